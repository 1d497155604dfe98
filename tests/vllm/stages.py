"""A worker for the CPU that can be one of several pipeline stages.

vLLM 0.32's own allocates what later stages take in only in a forward pass for profiling, which an
engine with a given size of cache skips. Report to vLLM; its connectors are not concerned.
"""

from typing import Any

from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker


class StageWorker(CPUWorker):
    """Allocates it when the model is loaded."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        runner = self.model_runner
        if (
            not get_pp_group().is_first_rank
            and getattr(runner, "intermediate_tensors", None) is None
        ):
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=runner.model_config.dtype,
                device=runner.device,
            )
