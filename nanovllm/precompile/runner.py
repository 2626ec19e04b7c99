"""AheadModelRunner: a ModelRunner whose kernels are compiled by other processes while its weights load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from nanovllm.config import Config
from nanovllm.device import Device
from nanovllm.layers.stream import Group
from nanovllm.models.config import ModelConfig
from nanovllm.precompile.ahead import Ahead, begin
from nanovllm.runner.model_runner import ModelRunner


class AheadModelRunner(ModelRunner):
    """Waits for its kernels before the first step of a start."""

    _ahead: Ahead | None = None  # until the start has ended

    def __init__(
        self,
        config: Config,
        model_config: ModelConfig,
        model_path: Path,
        device: Device,
        tp: Group,
        max_model_len: int,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """As `ModelRunner`."""
        self._ahead = begin(config, model_config, model_path, device, tp.size, max_model_len)
        try:
            super().__init__(config, model_config, model_path, device, tp, max_model_len, check)
        except BaseException:
            self._end_ahead()
            raise

    def calibrate_kv_cache(self) -> None:
        """As `ModelRunner`, which runs its first step here or next."""
        if self._ahead is not None:
            self._ahead.wait()
        super().calibrate_kv_cache()

    def capture_cudagraph(self) -> None:
        """As `ModelRunner`, which ends a start. The kernels of the first prompts are compiled meanwhile."""
        super().capture_cudagraph()
        if self._ahead is not None:
            self._ahead.wait()
            self._end_ahead()

    def exit(self) -> None:
        self._end_ahead()
        super().exit()

    def _end_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.stop()
