"""What a fit consists of apart from retained tensors: captured for records, restored in a promoted trainer."""
