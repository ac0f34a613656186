"""Your own head modules: any `nn.Module` class here is a value for HEAD in `config.py`."""
