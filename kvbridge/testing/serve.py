"""What happens in an agent's process: it does what the suite says, and answers.

Each agent has the threads that the contract foresees: one for its steps, and several that add
peers, and drop them, at the same time.
"""

import gc
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from kvbridge.errors import KVBridgeError
from kvbridge.testing.agent import Agent
from kvbridge.testing.harness import TransportSource
from kvbridge.testing.memory import SharedMemory
from kvbridge.testing.poller import HangingError
from kvbridge.testing.violations import RuleViolationError

IDLE_S = 0.001
REST_S = 0.005  # for agents that nobody has asked for anything lately, which are most of them
RESTLESS_S = 1.0
JOIN_S = 5.0
PEERING_THREADS = 8
PROCESS = 0  # stands for the process itself, where otherwise the number of an agent is


class Call(NamedTuple):
    """Something to be done by an agent.

    Attributes:
        id: Number of the call.
        agent: Number of the agent.
        method: What it is to do.
        args: Positional arguments.
        more: Others.
        aside: Whether it is done at once beside everything else, and not as the next step.
    """

    id: int
    agent: int
    method: str
    args: tuple[Any, ...] = ()
    more: Mapping[str, Any] = {}
    aside: bool = False


class Answer(NamedTuple):
    """What came of a call: its value, or an error as ``(class name, message)``.

    Attributes:
        call: Number of the call.
        value: What it returned.
        error: Name and message of the error that it raised.
        sort: Whose error it is: KVBridge's own (allowed), a broken rule, a wait that was too
            long, or any other exception, which no driver may let out.
    """

    call: int
    value: Any = None
    error: tuple[str, str] = ("", "")
    sort: str = "returned"


def answer(call: Call, function: Callable[..., Any]) -> Answer:
    """Make a call; whatever it raises becomes the answer."""
    try:
        return Answer(call.id, function(*call.args, **call.more))
    except KVBridgeError as error:
        return Answer(call.id, None, (type(error).__name__, str(error)), "error")
    except RuleViolationError as error:
        return Answer(call.id, None, (type(error).__name__, str(error)), "violation")
    except HangingError as error:
        return Answer(call.id, None, (type(error).__name__, str(error)), "hanging")
    except Exception as error:
        return Answer(call.id, None, (type(error).__name__, traceback.format_exc()), "foreign")


class _Actor:
    """An agent with its threads."""

    def __init__(self, agent: Agent, reply: Callable[[Answer], None]) -> None:
        self._agent = agent
        self._reply = reply
        self._asked = time.monotonic()
        self._steps: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._asides: queue.SimpleQueue[Call] = queue.SimpleQueue()
        targets = (self._step, *[self._do_asides] * PEERING_THREADS)
        self._threads = [threading.Thread(target=target, daemon=True) for target in targets]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        for calls in (self._steps, *[self._asides] * PEERING_THREADS):
            calls.put(Call(0, 0, "stop"))
        for thread in self._threads:
            thread.join(JOIN_S)

    def take(self, call: Call) -> None:
        self._asked = time.monotonic()
        (self._asides if call.aside else self._steps).put(call)

    def _step(self) -> None:
        while True:
            try:
                rests = time.monotonic() > self._asked + RESTLESS_S
                call = self._steps.get(timeout=REST_S if rests else IDLE_S)
            except queue.Empty:
                self._agent.idle()
                continue
            if call.method == "stop":
                return
            self._reply(answer(call, getattr(self._agent, call.method)))

    def _do_asides(self) -> None:
        while (call := self._asides.get()).method != "stop":
            self._reply(answer(call, getattr(self._agent, call.method)))


def serve(pipe: Connection, source: TransportSource, memory_descriptor: int) -> None:
    """Make agents and pass calls on to them until told to exit.

    Raises:
        EOFError: The suite has ended.
    """
    memory = SharedMemory(memory_descriptor)
    kind = source.load()
    actors: dict[int, _Actor] = {}
    sending = threading.Lock()

    def reply(one: Answer) -> None:
        with sending:
            pipe.send(one)

    def new_agent(number: int) -> None:
        actors[number] = _Actor(Agent(kind(), memory), reply)

    processwide: dict[str, Callable[..., Any]] = {
        "new_agent": new_agent,
        "forget_agent": lambda number: actors.pop(number).stop(),
        "collect_garbage": lambda: gc.collect() and None,
        "loaded_modules": lambda: sorted(sys.modules),
    }
    reply(Answer(0, memory.address))
    while True:
        call = pipe.recv()
        if call.method == "exit":
            # A thread of ours that the interpreter ends within a library would be our own fault.
            for actor in actors.values():
                actor.stop()
            return
        if call.agent == PROCESS:
            reply(answer(call, processwide[call.method]))
        else:
            actors[call.agent].take(call)
