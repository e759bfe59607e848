"""Batch inference of Mixture-of-Experts language models that do not fit the accelerator."""

__version__ = "0.1.0"
