"""The application: routes, checks and answers between the HTTP server and a model's Runner."""

from .base import Served, Settings
from .core import App

__all__ = ["App", "Served", "Settings"]
