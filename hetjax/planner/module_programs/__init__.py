"""Programs of modules: what members compute and move, tensor by tensor, and what it takes."""
