"""Every kind of input becomes bags of ids.

A feature's input is one of:

* a tensor of ids (B,), one id a sample, or (B, K), bags of K. More dimensions, (B, ..., K), are bags
  of K too, and the output is (B, ..., dim). A NumPy array or (nested) lists of ints are taken as
  ``torch.as_tensor`` takes them.
* a `Jagged`, a jagged nested tensor (B, *), or an object with ``values()`` and ``offsets()``.
* a sparse CSR or COO tensor (B, rows): ids are the columns, values the weights. Entries of an
  uncoalesced COO tensor count one by one, in their order.

Ids are int64 or int32, whatever holds them. Weights that an input has are used, also those of a
keyed jagged tensor; a table that cannot use them (combiner max or none) refuses them.
"""
