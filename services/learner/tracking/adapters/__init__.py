"""One tracker each: console, JSON lines, TensorBoard, Weights & Biases."""
