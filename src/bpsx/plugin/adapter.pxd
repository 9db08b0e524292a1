# C-level interface of bpsx for the plugins' extension modules; see adapter.py.
from bpsx.core._handle cimport Handle, Item
from bpsx.core.partition cimport EndCallback
