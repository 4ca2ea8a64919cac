"""What runs under a trainer's own Python on the training host. Imports torch and the trainer; nothing else of hsx."""
