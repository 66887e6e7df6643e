"""What the Triton models' model.py files call: pb_utils tensors to Request and back."""
