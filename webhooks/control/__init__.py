"""The private side of a process: health, metrics, and what waits; behind checks of who asks."""

from webhooks.control.app import Control

__all__ = ["Control"]
