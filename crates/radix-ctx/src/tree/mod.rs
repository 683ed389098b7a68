//! The core of both faces: a radix tree of words.
