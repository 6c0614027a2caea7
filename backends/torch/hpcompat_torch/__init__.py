"""The torch backend: DTensor parameters, ``torch.distributed`` collectives, device streams where there are any."""
