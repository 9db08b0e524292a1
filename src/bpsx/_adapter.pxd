# What a plugin's extension modules see of bpsx; see _adapter.py.
from bpsx._handle cimport Handle, Item
from bpsx.core.partition cimport Tell
