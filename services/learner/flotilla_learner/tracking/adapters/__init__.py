"""Adapters to trackers, one each: console, JSON lines, TensorBoard, Weights & Biases."""
