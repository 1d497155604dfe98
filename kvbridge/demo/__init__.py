"""A small decoder that runs split over processes, to show and to test the main job."""

from kvbridge.demo.cluster import DemoError
from kvbridge.demo.model import ModelConfig
from kvbridge.demo.run import PROMPT_MAX_BYTES, STEPS, DemoConfig, DemoReport, run_demo
from kvbridge.demo.shape import EngineShape

__all__ = [
    "PROMPT_MAX_BYTES",
    "STEPS",
    "DemoConfig",
    "DemoError",
    "DemoReport",
    "EngineShape",
    "ModelConfig",
    "run_demo",
]
