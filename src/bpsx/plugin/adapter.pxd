# What a plugin's extension modules see of bpsx; see adapter.py.
from bpsx.core._handle cimport Handle, Item
from bpsx.core.partition cimport Tell
