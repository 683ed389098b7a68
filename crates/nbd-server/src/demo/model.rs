//! The model of the demo's image: the expected content of each block, and the next request.
//!
//! The image is a sequence of 4 KiB blocks. A block's contents follow from its number and its
//! version, so the model keeps one number per block:
//!
//! | state | contents |
//! |---|---|
//! | 0 | zeroes |
//! | version | the pattern of that version |
//! | version, `TRIMMED` | either: a server may trim or not |
//!
//! # Invariants
//!
//! 1. A block that is being written (or trimmed, or zeroed) has no other request in flight, so its
//!    state is known whenever a read of it comes back.
//! 2. The shared blocks are written by the fill phase only.

use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::time::Instant;
use std::vec;

use nbd_protocol::{ClientError, NbdError, TransmissionFlags};

/// Unit of the model, in bytes.
pub(super) const BLOCK: usize = 4096;
/// Blocks per request of a sweep: 1 MiB.
const SWEEP: u64 = 256;
/// Blocks per large request of the mixed phase: 256 KiB.
const LARGE: u64 = 64;
/// Blocks per TRIM and WRITE_ZEROES of the mixed phase: 64 KiB.
const RANGE: u64 = 16;
/// Version of the shared blocks.
const FILLED: u32 = 1;
/// Marks a block that was trimmed since its version was written.
const TRIMMED: u32 = 1 << 31;

/// How the image is divided, in blocks: one eighth is shared, and the rest consists of equal
/// regions. The last region has the remaining blocks as well.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    shared: u64,
    region: u64,
    regions: u64,
    blocks: u64,
}

impl Layout {
    pub(super) fn new(size: u64, regions: u64) -> Self {
        let blocks = size / BLOCK as u64;
        let shared = blocks / 8;
        Self { shared, region: (blocks - shared) / regions, regions, blocks }
    }

    /// Returns whether every region has room for several large requests at once.
    pub(super) fn is_usable(&self) -> bool {
        self.region >= 4 * LARGE && self.shared > 0
    }

    /// Returns the smallest usable size for `regions` regions, in bytes.
    pub(super) fn smallest(regions: u64) -> u64 {
        (4 * LARGE * regions * 8).div_ceil(7).next_multiple_of(8) * BLOCK as u64
    }

    pub(super) fn region(&self, nr: u64) -> Region {
        let first = self.shared + nr * self.region;
        let end = if nr + 1 == self.regions { self.blocks } else { first + self.region };
        let blocks = (end - first) as usize;
        Region { first, states: vec![0; blocks], in_flight: vec![0; blocks], next: FILLED + 1 }
    }

    /// Returns the part of the shared blocks that connection `nr` fills and verifies.
    pub(super) fn shared_part(&self, nr: u64) -> Range<u64> {
        self.shared * nr / self.regions..self.shared * (nr + 1) / self.regions
    }
}

/// One connection's blocks.
#[derive(Debug)]
pub(super) struct Region {
    first: u64,
    states: Vec<u32>,
    /// For each block the number of reads in flight, or `WRITING`.
    in_flight: Vec<u8>,
    next: u32,
}

const WRITING: u8 = u8::MAX;

impl Region {
    /// Returns the indices of `blocks` within this region; `None` for shared blocks.
    fn local(&self, blocks: &Range<u64>) -> Option<Range<usize>> {
        let start = blocks.start.checked_sub(self.first)? as usize;
        Some(start..start + (blocks.end - blocks.start) as usize)
    }

    fn is_free(&self, op: &Op) -> bool {
        let limit = if op.kind.is_read() { WRITING - 2 } else { 0 };
        self.local(&op.blocks)
            .is_none_or(|range| self.in_flight[range].iter().all(|&count| count <= limit))
    }

    /// Records a request before it is sent.
    pub(super) fn begin(&mut self, op: &mut Op) {
        let Some(range) = self.local(&op.blocks) else {
            op.version = FILLED;
            return;
        };
        if op.kind.is_read() {
            self.in_flight[range].iter_mut().for_each(|count| *count += 1);
            return;
        }
        self.in_flight[range.clone()].fill(WRITING);
        match op.kind {
            Kind::Trim => {
                for state in &mut self.states[range] {
                    // A block of zeros remains one, trimmed or not.
                    *state |= if *state == 0 { 0 } else { TRIMMED };
                }
            }
            Kind::WriteZeroes => self.states[range].fill(0),
            _ => {
                op.version = self.next;
                self.next = (self.next + 1) % TRIMMED; // the pattern of 0 is zeros, as its state
                self.states[range].fill(op.version);
            }
        }
    }

    /// Records that the reply of a request has arrived.
    pub(super) fn end(&mut self, op: &Op) {
        let Some(range) = self.local(&op.blocks) else { return };
        if op.kind.is_read() {
            self.in_flight[range].iter_mut().for_each(|count| *count -= 1);
        } else {
            self.in_flight[range].fill(0);
        }
    }

    /// Compares the data of a read, or of a part of it, with the model.
    pub(super) fn verify(&self, blocks: Range<u64>, data: &[u8]) -> Result<(), DemoError> {
        let local = self.local(&blocks);
        for (i, (block, found)) in blocks.zip(data.chunks_exact(BLOCK)).enumerate() {
            let state = local.as_ref().map_or(FILLED, |range| self.states[range.start + i]);
            if state & TRIMMED != 0 && is_zero(found) {
                continue;
            }
            if let Some(at) = mismatch(found, block, state & !TRIMMED) {
                return Err(DemoError::WrongData {
                    offset: block * BLOCK as u64 + at as u64,
                    found: found[at],
                    expected: word(seed(block, state & !TRIMMED), at / 8)[at % 8],
                });
            }
        }
        Ok(())
    }
}

/// Returns the start value of a block's pattern; 0 stands for a block of zeros.
fn seed(block: u64, version: u32) -> u64 {
    if version == 0 {
        return 0;
    }
    // The finaliser of splitmix64: neighbouring blocks and versions share no pattern.
    let mut x = (block << 32 | u64::from(version)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (x ^ (x >> 31)) | 1
}

/// Returns the eight bytes with the number `index` of a pattern. All differ.
fn word(seed: u64, index: usize) -> [u8; 8] {
    if seed == 0 {
        return [0; 8];
    }
    seed.wrapping_add((index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_le_bytes()
}

/// Appends the contents of `blocks` at `version`.
pub(super) fn put_pattern(out: &mut Vec<u8>, blocks: Range<u64>, version: u32) {
    let start = out.len();
    out.resize(start + (blocks.end - blocks.start) as usize * BLOCK, 0);
    for (block, bytes) in blocks.zip(out[start..].chunks_exact_mut(BLOCK)) {
        let seed = seed(block, version);
        for (i, bytes) in bytes.chunks_exact_mut(8).enumerate() {
            bytes.copy_from_slice(&word(seed, i));
        }
    }
}

/// Returns the index of the first byte of `found` that differs from the pattern.
fn mismatch(found: &[u8], block: u64, version: u32) -> Option<usize> {
    let seed = seed(block, version);
    // Without an early exit the compiler makes vector code. The index of the byte is computed only
    // for a mismatch.
    let words = found.chunks_exact(8).enumerate();
    let differ = words
        .fold(0, |differ, (i, found)| differ | (number(found) ^ u64::from_le_bytes(word(seed, i))));
    if differ == 0 {
        return None;
    }
    (0..found.len()).find(|&at| found[at] != word(seed, at / 8)[at % 8])
}

fn is_zero(found: &[u8]) -> bool {
    found.chunks_exact(8).fold(0, |any, found| any | number(found)) == 0
}

fn number(bytes: &[u8]) -> u64 {
    bytes.try_into().map_or(0, u64::from_le_bytes)
}

/// A kind of request, as listed in the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    Write,
    WriteFua,
    LargeRead,
    LargeWrite,
    Trim,
    WriteZeroes,
    Flush,
}

impl Kind {
    pub(super) const ALL: [Self; 8] = [
        Self::Read,
        Self::Write,
        Self::WriteFua,
        Self::LargeRead,
        Self::LargeWrite,
        Self::Trim,
        Self::WriteZeroes,
        Self::Flush,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Read => "read 4 KiB",
            Self::Write => "write 4 KiB",
            Self::WriteFua => "write 4 KiB, FUA (durable)",
            Self::LargeRead => "large read, 256 KiB",
            Self::LargeWrite => "large write, 256 KiB",
            Self::Trim => "trim (discard) 64 KiB",
            Self::WriteZeroes => "zero 64 KiB",
            Self::Flush => "flush",
        }
    }

    pub(super) fn is_read(self) -> bool {
        matches!(self, Self::Read | Self::LargeRead)
    }

    pub(super) fn is_write(self) -> bool {
        matches!(self, Self::Write | Self::WriteFua | Self::LargeWrite)
    }
}

/// A request: its kind, its blocks, and for a write the version.
#[derive(Clone, Debug)]
pub(super) struct Op {
    pub(super) kind: Kind,
    pub(super) blocks: Range<u64>,
    pub(super) version: u32,
    /// Sets NO_HOLE on zeroing, or DF on a read: half the time, if the server offers it.
    pub(super) flagged: bool,
}

impl Op {
    fn new(kind: Kind, blocks: Range<u64>) -> Self {
        Self { kind, blocks, version: 0, flagged: false }
    }

    /// Start, in bytes.
    pub(super) fn offset(&self) -> u64 {
        self.blocks.start * BLOCK as u64
    }

    /// Length, in bytes; fits the 32 bits of a request.
    pub(super) fn len(&self) -> u32 {
        (self.blocks.end - self.blocks.start) as u32 * BLOCK as u32
    }

    /// Returns the blocks of a part of the request. `None` if the part is not within the request, or has a part of a
    /// block.
    pub(super) fn part(&self, offset: u64, len: usize) -> Option<Range<u64>> {
        let unit = BLOCK as u64;
        let blocks = offset / unit..offset.checked_add(len as u64)? / unit;
        let is_whole = offset.is_multiple_of(unit) && len.is_multiple_of(BLOCK);
        let is_within = blocks.start >= self.blocks.start && blocks.end <= self.blocks.end;
        (is_whole && is_within).then_some(blocks)
    }
}

/// The next step of a plan.
pub(super) enum Next {
    /// Send this one.
    Send(Op),
    /// Ask again after a reply.
    Wait,
    /// Nothing more.
    End,
}

/// The sequence of requests of a connection in one phase.
pub(super) trait Plan {
    fn next(&mut self, region: &Region, offered: TransmissionFlags) -> Next;
}

/// Every block of a region, and of a part of the shared ones, once and in order. Writes are followed by a FLUSH, if the
/// server offers it.
pub(super) fn sweep(
    region: &Region,
    shared: Range<u64>,
    write: bool,
    offered: TransmissionFlags,
) -> vec::IntoIter<Op> {
    let kind = if write { Kind::LargeWrite } else { Kind::LargeRead };
    let own = region.first..region.first + region.states.len() as u64;
    let of = |range: Range<u64>| {
        let starts = range.clone().step_by(SWEEP as usize);
        starts.map(move |start| Op::new(kind, start..range.end.min(start + SWEEP)))
    };
    let mut ops: Vec<_> = of(shared).chain(of(own)).collect();
    if write && offered.contains(TransmissionFlags::SEND_FLUSH) {
        ops.push(Op::new(Kind::Flush, 0..0));
    }
    ops.into_iter()
}

impl Plan for vec::IntoIter<Op> {
    fn next(&mut self, _region: &Region, _offered: TransmissionFlags) -> Next {
        Iterator::next(self).map_or(Next::End, Next::Send)
    }
}

/// Random requests for a time or a number, then a flush.
#[derive(Debug)]
pub(super) struct Mixed {
    shared: u64,
    random: u64,
    until: Instant,
    at_least: u64,
    only_trims: bool,
    flush: bool,
}

impl Mixed {
    /// TRIMs alone, until `until`.
    pub(super) fn trims(layout: &Layout, seed: u64, until: Instant) -> Self {
        Self { only_trims: true, ..Self::new(layout, seed, until, 0) }
    }

    /// Ends at `until` or after `at_least` requests, whichever is later.
    pub(super) fn new(layout: &Layout, seed: u64, until: Instant, at_least: u64) -> Self {
        // xorshift must not start at 0.
        let random = self::seed(seed, 1);
        Self { shared: layout.shared, random, until, at_least, only_trims: false, flush: true }
    }

    /// A number below `bound`. The generator is xorshift64*; its bias is of no concern here.
    fn below(&mut self, bound: u64) -> u64 {
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        (self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) % bound.max(1)
    }

    fn op(&mut self, region: &Region, offered: TransmissionFlags) -> Op {
        let has = |flag| offered.contains(flag);
        // Per 10,000 requests: 5 flushes, 50 trims, 50 zeroings, 100 large reads and 50 large
        // writes; the rest of 4 KiB, 70 % reads, of which a quarter in the shared blocks. 1 in
        // 100 of the writes with FUA, as each waits for the device.
        let kind = match self.below(10_000) {
            _ if self.only_trims => Kind::Trim,
            0..5 if has(TransmissionFlags::SEND_FLUSH) => Kind::Flush,
            5..55 if has(TransmissionFlags::SEND_TRIM) => Kind::Trim,
            55..105 if has(TransmissionFlags::SEND_WRITE_ZEROES) => Kind::WriteZeroes,
            105..205 => Kind::LargeRead,
            205..255 => Kind::LargeWrite,
            _ => match self.below(1000) {
                0..700 => Kind::Read,
                700..703 if has(TransmissionFlags::SEND_FUA) => Kind::WriteFua,
                _ => Kind::Write,
            },
        };
        let count = match kind {
            Kind::Flush => return Op::new(kind, 0..0),
            Kind::LargeRead | Kind::LargeWrite => LARGE,
            Kind::Trim | Kind::WriteZeroes => RANGE,
            Kind::Read | Kind::Write | Kind::WriteFua => 1,
        };
        let start = if kind == Kind::Read && self.below(4) == 0 {
            self.below(self.shared)
        } else {
            region.first + self.below(region.states.len() as u64 - count + 1)
        };
        let flagged = self.below(2) == 0;
        Op { flagged, ..Op::new(kind, start..start + count) }
    }
}

impl Plan for Mixed {
    fn next(&mut self, region: &Region, offered: TransmissionFlags) -> Next {
        if self.at_least == 0 && Instant::now() >= self.until {
            let last = std::mem::take(&mut self.flush);
            return if last && offered.contains(TransmissionFlags::SEND_FLUSH) {
                Next::Send(Op::new(Kind::Flush, 0..0))
            } else {
                Next::End
            };
        }
        // A region has room for many requests, so a free place is found soon. Otherwise a reply
        // frees one.
        for _ in 0..8 {
            let op = self.op(region, offered);
            if region.is_free(&op) {
                self.at_least = self.at_least.saturating_sub(1);
                return Next::Send(op);
            }
        }
        Next::Wait
    }
}

/// Why the demo failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DemoError {
    #[error("cannot connect to {}: {source}", path.display())]
    Connect { path: PathBuf, source: io::Error },
    /// The connection broke, or the server was silent for 30 seconds.
    #[error("connection lost: {0}")]
    Lost(#[from] io::Error),
    /// The server broke the protocol or refused the export.
    #[error(transparent)]
    Protocol(#[from] ClientError),
    #[error("image of {size} bytes: the demo needs a writable one of {needed} bytes or more")]
    Unusable { size: u64, needed: u64 },
    #[error("{kind} of {len} bytes at {offset} failed: {error}")]
    Failed { kind: &'static str, offset: u64, len: u64, error: NbdError },
    /// A reply that matches no request, or has wrong contents for its request.
    #[error("reply does not fit its request: {0}")]
    Stray(String),
    /// A byte differs from what was written.
    #[error("wrong data at byte {offset}: {found:#04x} instead of {expected:#04x}")]
    WrongData { offset: u64, found: u8, expected: u8 },
}
