"""More forms of `export`: ONNX in fp16 and int8, OpenVINO; a table of accuracy and speed."""
