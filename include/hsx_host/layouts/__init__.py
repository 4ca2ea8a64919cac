"""The containers that formats are made of, laid out before they are filled: torch.save files and safetensors."""
