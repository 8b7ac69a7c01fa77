"""The command `probe`: scores pretrained weights on your images by a linear probe."""

NEEDS = ("linear_probe",)  # another tool: a run without epochs is that alone
