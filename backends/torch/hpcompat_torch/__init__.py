"""The torch backend: DTensor parameters, ``torch.distributed`` collectives, device streams where there are any."""

# First: says by name what this torch lacks.
from hpcompat_torch import private as private
