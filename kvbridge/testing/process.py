"""The suite's side of an agent's process."""

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import psutil

from kvbridge import errors
from kvbridge.errors import KVBridgeError, TransportError
from kvbridge.namespaces import NetworkNamespace
from kvbridge.testing.forkserver import START_S, fork_server, import_path
from kvbridge.testing.harness import TransportHarness
from kvbridge.testing.memory import SharedMemory
from kvbridge.testing.serve import PROCESS, Answer, Call
from kvbridge.testing.violations import RuleViolationError

GRACE_S = 10.0  # for what is bounded on the other side anyway
KILL_S = 20.0  # a killed process may hang in the kernel: then the report says where


class Resources(dict[str, int]):
    """What a process holds, by name."""

    def grown_since(self, before: "Resources", slack: Mapping[str, int]) -> list[str]:
        """Return in words what has grown by more than its slack."""
        return [
            f"{name} {before[name]} became {self[name]} (may grow by {slack[name]})"
            for name in slack
            if self[name] > before[name] + slack[name]
        ]


class Pending:
    """A call that was sent and not waited for yet."""

    def __init__(self, process: "AgentProcess", call: Call) -> None:
        """Remember whom to ask."""
        self._process = process
        self._call = call

    def result(self, timeout_s: float) -> Any:
        """Return what it returned, or raise what it raised.

        Raises:
            RuleViolationError: It hangs, its process died, or a foreign exception came out.
            KVBridgeError: The very error that the transport raised.
        """
        what = f"transport call {self._call.method!r}"
        answer = self._process.answer(self._call.id, timeout_s, what)
        name, message = answer.error
        if answer.sort == "returned":
            return answer.value
        if answer.sort == "error":
            raise _error(name, message)
        if answer.sort == "foreign":
            raise RuleViolationError(
                f"{what}: raised {name}, must raise an error of kvbridge.errors or none\n{message}"
            )
        raise RuleViolationError(message if answer.sort == "violation" else f"{what}: {message}")


class AgentProcess:
    """A process of its own, in which agents can be made and told what to do."""

    def __init__(
        self, harness: TransportHarness, memory: SharedMemory, namespace: NetworkNamespace | None
    ) -> None:
        """Start it; returns at once."""
        self.memory = memory
        self.dead = False
        self._ids = itertools.count(1)
        self._agents = itertools.count(1)
        self._answers: dict[int, Answer] = {}
        self._base: int | None = None
        self._pipe, theirs = Pipe()
        namespaces = namespace.descriptors if namespace else ()
        environment = {**os.environ, **harness.environment}
        with theirs:
            self._process = fork_server(environment).fork(
                theirs.fileno(), memory.descriptor, *namespaces
            )
        self._pipe.send((environment, import_path(), harness.source))

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    @property
    def base(self) -> int:
        """Address of the shared memory in there; waits until the process is ready."""
        if self._base is None:
            self._base = int(self.answer(0, START_S, "starting an agent's process").value)
        return self._base

    @property
    def exit_code(self) -> int | None:
        """How it ended, or None."""
        return self._process.wait(0)

    def new_agent(self) -> int:
        """Make one more agent, which is not open yet."""
        _ = self.base
        number = next(self._agents)
        self.start(PROCESS, "new_agent", number).result(START_S)
        return number

    def start(self, agent: int, method: str, *args: Any, **more: Any) -> Pending:
        """Tell an agent to do something as its next step, without waiting."""
        return self._send(Call(next(self._ids), agent, method, args, more))

    def start_aside(self, agent: int, method: str, *args: Any) -> Pending:
        """Tell an agent to do something beside its steps, without waiting."""
        return self._send(Call(next(self._ids), agent, method, args, aside=True))

    def _send(self, call: Call) -> Pending:
        try:
            self._pipe.send(call)
        except OSError:
            self._complain(f"transport call {call.method!r}")
        return Pending(self, call)

    def answer(self, call: int, timeout_s: float, what: str) -> Answer:
        """Wait for the answer to a call."""
        while call not in self._answers:
            try:
                if not self._pipe.poll(timeout_s):
                    self._give_up_on()
                    raise RuleViolationError(
                        f"{what} did not return within {timeout_s:g} s; "
                        "the standard error shows where the agent's process is"
                    )
                answer = self._pipe.recv()
            except (EOFError, OSError):
                self._complain(what)
            self._answers[answer.call] = answer
        return self._answers.pop(call)

    def _give_up_on(self) -> None:
        # Whatever it is busy with, nothing more can be asked of it but where it is.
        if self.exit_code is None:
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(0.2)
        self.kill()

    def _complain(self, what: str) -> None:
        expected, self.dead = self.dead, True
        self._process.wait(GRACE_S)
        if expected:
            raise RuleViolationError(f"{what}: the suite had killed the process (its own mistake)")
        raise RuleViolationError(f"{what}: the agent's process died, {how_ended(self.exit_code)}")

    def resources(self) -> Resources:
        """Return what the process holds right now."""
        self.start(PROCESS, "collect_garbage").result(START_S)
        process = psutil.Process(self.pid)
        with process.oneshot():
            return Resources(
                descriptors=process.num_fds(),
                threads=process.num_threads(),
                private_kib=process.memory_full_info().uss >> 10,
            )

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, such as SIGSTOP; that has stopped it on return."""
        self._process.send_signal(number)
        deadline = time.monotonic() + KILL_S
        while number == signal.SIGSTOP and not _is_stopped(self.pid):
            if time.monotonic() > deadline:
                raise RuleViolationError(f"process {self.pid} does not stop")
            time.sleep(0.001)

    def kill(self) -> None:
        """End it the hard way: nothing is cleaned up."""
        self.dead = True
        self._process.send_signal(signal.SIGKILL)
        if self._process.wait(KILL_S) is None:
            raise RuleViolationError(
                f"process {self.pid} was killed and is still there after {KILL_S:g} s: "
                f"{_whereabouts(self.pid)}"
            )

    def exit(self) -> int:
        """Let the interpreter end in the ordinary way, with whatever is still open.

        Raises:
            RuleViolationError: It does not end.
        """
        self.dead = True
        with contextlib.suppress(OSError):
            self._pipe.send(Call(0, PROCESS, "exit"))
        status = self._process.wait(GRACE_S)
        if status is None:
            self.kill()
            raise RuleViolationError(f"the agent's process did not end within {GRACE_S:g} s")
        return status

    def close(self) -> None:
        """Make sure that it is gone."""
        if self.exit_code is None:
            self.kill()
        self._pipe.close()


def _is_stopped(pid: int) -> bool:
    """Whether all threads of a process have stopped; the signal takes effect one by one."""
    states = []
    for task in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            states.append(task.read_text().rpartition(")")[2].split()[0])
    return all(state in "TtZX" for state in states)


def _whereabouts(pid: int) -> str:
    """Say what the kernel knows of a process that does not end."""
    said = []
    for name in ("status", "wchan", "stack"):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/{name}").read_text(errors="replace")
            lines = text.splitlines()
            said += [line for line in lines if name != "status" or line.startswith("State")]
    return "; ".join(said) or "nothing is known of it"


def how_ended(code: int | None) -> str:
    """Say in words how a process ended."""
    if code is None:
        return "and did not end"
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"


def _error(name: str, message: str) -> KVBridgeError:
    kind = getattr(errors, name, TransportError)  # a driver may derive its own from ours
    error: KVBridgeError = kind.__new__(kind)
    Exception.__init__(error, message)
    return error


def check_alive(processes: Sequence[AgentProcess]) -> None:
    """Break the rule where a process died that nobody killed."""
    for process in processes:
        if not process.dead and process.exit_code is not None:
            raise RuleViolationError(
                f"an agent's process died by itself, {how_ended(process.exit_code)}"
            )
