"""The tool `export`: a trained model as ONNX, torch.export program or safetensors."""
