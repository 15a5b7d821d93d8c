// A block of sorted keys: `near` keys from place `first` of the sorted order on, with ranks from `rank` on among the
// `keys` keys of their part. Samples are ranks within the part.
struct Block {
  int first, near, rank, keys, part, parts;
};
// An unmasked part of a causal problem, or a whole problem without a mask. Places count along the sorted orders of
// queries and keys, blocks along the table of blocks.
struct Part {
  int row, rows, row_place, key_place, keys, block, blocks;
};
// Some rows of a separately sorted segment: places [place, end), rows from `row` on before the first pass.
struct Chunk {
  int segment, place, end, row;
};
