// A block of sorted keys: `near` keys from place `first` of the sorted order on, which have the ranks from `rank` on among
// the `keys` keys of their part. Samples are ranks within the part.
struct Block {
  int first, near, rank, keys, part, parts;
};
// A part of a causal problem, or the whole of one without a mask: every row sees every key. Places count along the
// sorted orders of queries and keys, blocks along the table of blocks.
struct Part {
  int row, rows, row_place, key_place, keys, block, blocks;
};
// Some rows of a segment that is sorted on its own: places [place, end), rows from `row` on before the first pass.
struct Chunk {
  int segment, place, end, row;
};
