"""A small decoder that runs split over processes, to show and to test the main job."""

from kvbridge.demo.cluster import DemoError
from kvbridge.demo.model import ModelConfig
from kvbridge.demo.run import STEPS, DemoConfig, DemoReport, run_demo
from kvbridge.demo.shape import EngineShape

__all__ = [
    "STEPS",
    "DemoConfig",
    "DemoError",
    "DemoReport",
    "EngineShape",
    "ModelConfig",
    "run_demo",
]
