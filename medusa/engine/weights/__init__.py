"""The weights of a base: from its files, in the form in which an engine holds them, into its modules.

    load.py       load_base, the one function that loads a base: for an engine, on a device, in a type
    sources.py    what each kind of files holds: checkpoints, quantised directories, GGUF files
    plan.py       the base as it will be held, before a weight is read: its memory, and whether it fits
    hold.py       the one place that puts what holds a weight in the place of a module
    stored.py     a matrix as files have it: numbers, or quantised rows; which product and lookup hold it
    products.py   modules that multiply by packed matrices, alone or joined with others of one input
    forms.py      the forms of packed matrices: exactly in a type, in twelve bits, in int8, in a file's bits
    lookups.py    embeddings whose rows stay in their file
    experts.py    experts of a mixture, and its router
    columns.py    matrices that layers multiply themselves
    own_head.py   layers for multi-token prediction that come with a base
    file_tensors.py  tensors of a GGUF file, widened or in their bits
    memory.py     memory in huge pages, and pages of files that are given back

A base is planned and held by the same code: a plan is a base that is held without memory, of matrices that
have shapes and no numbers.
"""
