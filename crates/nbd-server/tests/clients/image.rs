//! Image files: sparse with random parts, and their comparison.

use testkit::rng::Rng;

use crate::lab::*;

/// The same seed gives the same bytes.
pub(crate) struct Random(Rng);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(Rng::with_seed(seed))
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0.u64(..bound)
    }

    pub(crate) fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.0.fill(&mut bytes);
        bytes
    }
}

/// A sparse file of `size` bytes.
pub(crate) fn sparse(path: &Path, size: u64) -> Res<File> {
    let options = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path);
    let file = options.map_err(|e| format!("{}: {e}", path.display()))?;
    file.set_len(size)?;
    Ok(file)
}

/// A sparse file with `parts` random extents of up to 1 MiB at 4 KiB boundaries.
pub(crate) fn with_parts(path: &Path, size: u64, parts: u64, seed: u64) -> Res<File> {
    let file = sparse(path, size)?;
    let mut random = Random::new(seed);
    for _ in 0..parts {
        let len = (1 + random.below(256)) * 4096;
        let offset = random.below((size - len) / 4096 + 1) * 4096;
        let bytes = random.bytes(len as usize);
        file.write_all_at(&bytes, offset)?;
    }
    Ok(file)
}

/// Fails, naming the first differing byte, unless both files hold the same bytes.
pub(crate) fn same(a: &Path, b: &Path) -> Res {
    let (left, right) = (File::open(a)?, File::open(b)?);
    let (len, other) = (left.metadata()?.len(), right.metadata()?.len());
    check!(len == other, "{} has {len} bytes, {} {other}", a.display(), b.display());
    let mut pieces = (vec![0; MIB as usize], vec![0; MIB as usize]);
    let mut offset = 0;
    while offset < len {
        let n = MIB.min(len - offset) as usize;
        left.read_exact_at(&mut pieces.0[..n], offset)?;
        right.read_exact_at(&mut pieces.1[..n], offset)?;
        if pieces.0[..n] != pieces.1[..n] {
            let at = (0..n).find(|&i| pieces.0[i] != pieces.1[i]).expect("they differ");
            let at = offset + at as u64;
            fail!("{} and {} differ at byte {at}", a.display(), b.display());
        }
        offset += n as u64;
    }
    Ok(())
}

/// Reads `len` bytes at `offset`.
pub(crate) fn bytes_at(path: &Path, offset: u64, len: usize) -> Res<Vec<u8>> {
    let mut bytes = vec![0; len];
    File::open(path)?.read_exact_at(&mut bytes, offset)?;
    Ok(bytes)
}

/// The bytes that a file occupies on its disk, after writing back what is still in memory.
pub(crate) fn allocated(path: &Path) -> Res<u64> {
    File::open(path)?.sync_all()?;
    Ok(fs::metadata(path)?.blocks() * 512)
}
