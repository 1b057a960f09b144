"""Check files that anyone may have written, before anything is built from them.

A file may hold any bytes. `load` accepts only what `save` would write for the model that the user
passes; everything else raises one `PruneError`. The checks run in this order:

1. Length, number of values and nesting of the JSON text; then its syntax, without the extensions
   that Python accepts (`json_text`).
2. Version and parts of the metadata (`metadata.check_parts`).
3. Size of the file and number of tensors against the model (`tensors.check_file_size`), before
   any tensor is read.
4. SHA-256 of the metadata and of all tensors (`checksum`); files of version 1 have none.
5. Names of shared tensors and the amount of stored code; then the fields of the recipe and their
   types (`metadata`).
6. The recipe against the model: names, indices, sizes, replaced and removed modules (`recipe`).
7. Stored code against the small model (`stored_code`). Its format is closed: `decode` in
   `polarprune.rewriting.stored_graphs` builds nodes only from the functions, methods and
   attributes that `polarprune.rewriting.allowed_calls` lists by name.
8. Name, shape and type of every tensor against the small model (`tensors.check_fit`).

In: text, plain data and tensors from a file, and the user's model. Out: nothing, or a
`PruneError`. The checks run no stored code and change neither the model nor the file.
"""
