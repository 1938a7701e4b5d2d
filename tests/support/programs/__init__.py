"""What is trained and inspected: small models, autograd.Functions, optimizers, listings."""
