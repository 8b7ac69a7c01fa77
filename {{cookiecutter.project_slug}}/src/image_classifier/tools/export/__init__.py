"""The command `export`: writes a model as ONNX, torch.export or safetensors, and verifies it."""
