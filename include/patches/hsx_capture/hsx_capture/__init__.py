"""Hidden states out of SGLang's forward pass, into files laid out by the client.

A general plugin of SGLang (entry point group ``sglang.srt.plugins``), active only where ``HSX_CAPTURE_SPEC`` names a
spec. It knows rows, planes and files; nothing of data sets, and nothing of whoever sends the requests.

Layer k is the residual stream that enters block k, counted from 0; the final hidden state is taken before the norm.
"""

__version__ = "1.0.0"
