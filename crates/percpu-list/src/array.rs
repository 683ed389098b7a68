//! The entries of one slot: a dense array of pointers, in segments that never move.
//!
//! ```text
//!  segments -> | 512 cells | 512 cells | 512 cells      |
//!                ^ 0                     ^ 1024     ^ len
//!  cell        -> an anchor, whose `index` is this cell's
//!              or a hole: the holes before and after it in a list of their own
//! ```
//!
//! Removal moves the last entry into the gap, so that a walk meets no gaps. While somebody walks
//! with the lock dropped, nothing may move behind him: a removal then leaves a hole, an addition
//! fills one, and later removals close those that are left, one each. Every operation takes a
//! constant number of steps, but for holes at the end, which are popped once each.
//!
//! Growing is in two parts, so that no memory is asked for under a lock: [`Array::growth_size`] says what
//! to allocate, [`Array::install`] puts it in.
//!
//! # Invariants
//!
//! 1. Cells below `len` are entries or holes; the last of them is an entry.
//! 2. An entry's anchor is alive, and has the cell's index.
//! 3. `holes` cells are holes, in one doubly linked list from `first_hole`.
//! 4. `top.wrapping_add(i)` is the cell of place `i` in the segment that begins with place `first`.
//!    While there are no holes, `len < limit` says that appending there is all there is to do, and
//!    `first < len` that the last entry is there; while there are some, neither is ever true.
//! 5. Every segment but the first has [`SEGMENT`] cells; the first has as many if there is a second.

use std::alloc::{Layout, alloc, dealloc};
use std::ptr::{self, NonNull};

use percpu::AllocError;

use crate::anchor::Anchor;

/// Cells in a segment: a page. A model has small ones, to see them change.
pub(crate) const SEGMENT: u32 = if cfg!(any(offlock_loom, offlock_shuttle)) { 2 } else { 512 };
/// Cells in the first segment of a short list, and by how much it grows: guesses.
const FIRST_LEN: u32 = if cfg!(any(offlock_loom, offlock_shuttle)) { 1 } else { 8 };
const GROWTH: u32 = 4;

/// No hole. Also more entries than there can be.
const NO_INDEX: u32 = (1 << 31) - 1;

/// A pointer to an anchor, or (odd) the holes before and after this one.
type Cell = *mut Anchor;

fn hole(before: u32, after: u32) -> Cell {
    ptr::without_provenance_mut((before as usize) << 32 | (after as usize) << 1 | 1)
}

fn is_hole(cell: Cell) -> bool {
    cell.addr() & 1 == 1
}

/// The holes before and after.
fn neighbours(cell: Cell) -> (u32, u32) {
    ((cell.addr() >> 32) as u32, (cell.addr() >> 1) as u32 & NO_INDEX)
}

/// Memory for cells, not initialised; freed on drop.
#[derive(Debug)]
pub(crate) struct Segment {
    cells: NonNull<Cell>,
    len: u32,
}

impl Segment {
    fn layout(len: u32) -> Layout {
        // No overflow: at most `SEGMENT` pointers.
        Layout::array::<Cell>(len as usize).unwrap_or(Layout::new::<Cell>())
    }

    fn allocate(len: u32) -> Result<Self, AllocError> {
        // SAFETY: `len` is not 0: see `Array::growth_size`.
        let cells = unsafe { alloc(Self::layout(len)) };
        Ok(Self { cells: NonNull::new(cells.cast()).ok_or_else(AllocError::new)?, len })
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: allocated by `allocate` with this layout.
        unsafe { dealloc(self.cells.as_ptr().cast(), Self::layout(self.len)) };
    }
}

/// What an array needs to hold one more entry.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GrowthSize {
    cells: u32,
    directory: usize,
}

/// Memory that an array needs to grow; and after [`Array::install`], what it no longer needs.
#[derive(Debug)]
pub(crate) struct Growth {
    segment: Option<Segment>,
    directory: Vec<Segment>,
}

impl Growth {
    /// Allocates it, without any lock.
    pub(crate) fn allocate(size: GrowthSize) -> Result<Self, AllocError> {
        let mut directory = Vec::new();
        directory.try_reserve_exact(size.directory).map_err(|_| AllocError::new())?;
        Ok(Self { segment: Some(Segment::allocate(size.cells)?), directory })
    }
}

/// See the module. `&mut self` is had by whoever holds the slot's lock.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Array {
    top: *mut Cell,
    first: u32,
    len: u32,
    limit: u32,
    capacity: u32,
    first_hole: u32,
    holes: u32,
    segments: Vec<Segment>,
}

// SAFETY: the anchors that it points to are `Sync`, and used under the slot's lock.
unsafe impl Send for Array {}

impl Array {
    /// How many of its first bytes additions and removals write.
    #[cfg(not(any(offlock_loom, offlock_shuttle)))]
    pub(crate) const WRITTEN: usize = std::mem::offset_of!(Self, segments);

    /// Empty, without memory.
    pub(crate) const fn new() -> Self {
        Self {
            top: ptr::null_mut(),
            first: 0,
            len: 0,
            limit: 0,
            capacity: 0,
            first_hole: NO_INDEX,
            holes: 0,
            segments: Vec::new(),
        }
    }

    /// Places, holes among them: indexes are below.
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// Entries.
    pub(crate) fn entries(&self) -> u32 {
        self.len - self.holes
    }

    /// True if [`insert`](Self::insert) may be called.
    #[inline(always)]
    pub(crate) fn has_room(&self) -> bool {
        self.len < self.limit || self.holes != 0 || self.len < self.capacity
    }

    /// # Safety
    ///
    /// `index` is below `capacity`.
    #[inline(always)]
    unsafe fn cell(&self, index: u32) -> *mut Cell {
        // SAFETY: a segment for each `SEGMENT` places below `capacity`.
        let segment = unsafe { self.segments.get_unchecked((index / SEGMENT) as usize) };
        // SAFETY: invariant 5, and the caller's bound.
        unsafe { segment.cells.as_ptr().add((index % SEGMENT) as usize) }
    }

    /// The entry at `index`; `None` if there is a hole, or nothing any more.
    #[inline]
    pub(crate) fn get(&self, index: u32) -> Option<NonNull<Anchor>> {
        if index >= self.len {
            return None;
        }
        // SAFETY: below `len`, so below `capacity`.
        let at = unsafe { self.cell(index) };
        // SAFETY: invariant 1: it was written.
        let cell = unsafe { *at };
        if is_hole(cell) { None } else { NonNull::new(cell) }
    }

    /// The last entry, if there is one.
    #[inline]
    pub(crate) fn last(&self) -> Option<NonNull<Anchor>> {
        self.get(self.len.checked_sub(1)?)
    }

    /// Goes over all entries, in the order of their places.
    #[inline]
    pub(crate) fn for_each(&self, mut f: impl FnMut(NonNull<Anchor>)) {
        let mut left = self.len as usize;
        for segment in &self.segments {
            let here = left.min(segment.len as usize);
            // SAFETY: invariant 1: that many cells were written; nobody changes them, by `&self`.
            let cells = unsafe { std::slice::from_raw_parts(segment.cells.as_ptr(), here) };
            for &cell in cells {
                if let (false, Some(anchor)) = (is_hole(cell), NonNull::new(cell)) {
                    f(anchor);
                }
            }
            left -= here;
        }
    }

    /// Makes invariant 4 true again, for the segment of the next place if there is one, else of the
    /// last.
    fn select_segment(&mut self) {
        let Some(newest) = self.segments.len().checked_sub(1) else { return };
        self.select((self.len / SEGMENT).min(newest as u32));
    }

    /// The same, for the segment of the last place: after removals, when the next is as likely as an
    /// addition.
    fn select_last_segment(&mut self) {
        match self.len.checked_sub(1) {
            Some(last) => self.select(last / SEGMENT),
            None => self.select_segment(),
        }
    }

    fn select(&mut self, number: u32) {
        let segment = &self.segments[number as usize];
        let first = number * SEGMENT;
        self.top = segment.cells.as_ptr().wrapping_sub(first as usize);
        let none = self.holes == 0;
        (self.first, self.limit) = if none { (first, first + segment.len) } else { (u32::MAX, 0) };
    }

    /// Puts an entry in, and writes its index.
    ///
    /// # Safety
    ///
    /// [`has_room`](Self::has_room). The anchor is in no array, and stays alive and in place until
    /// it is taken out.
    #[inline(always)]
    pub(crate) unsafe fn insert(&mut self, anchor: NonNull<Anchor>) {
        let index = self.len;
        if index >= self.limit {
            return self.insert_slow(anchor);
        }
        let at = self.top.wrapping_add(index as usize);
        // SAFETY: invariant 4: a cell of the segment.
        unsafe { *at = anchor.as_ptr() };
        self.len = index + 1;
        // SAFETY: alive, says the caller.
        unsafe { anchor.as_ref() }.set_index(index);
    }

    /// Puts an entry into a hole, or into the next segment.
    #[cold]
    #[inline(never)]
    fn insert_slow(&mut self, anchor: NonNull<Anchor>) {
        let index = if self.holes != 0 { self.first_hole } else { self.len };
        if index == self.len {
            assert!(index < self.capacity, "no room");
            self.len += 1;
        } else {
            self.unlink_hole(index);
        }
        self.write(index, anchor.as_ptr());
        self.select_segment();
    }

    /// Takes out the entry at `index`, whose own index is left as it is. Others move only if
    /// `may_move`.
    ///
    /// # Safety
    ///
    /// There is an entry at `index`.
    #[inline(always)]
    pub(crate) unsafe fn remove(&mut self, index: u32, may_move: bool) {
        debug_assert!(self.get(index).is_some());
        if self.len <= self.first || !may_move {
            return self.remove_slow(index, may_move);
        }
        let last = self.len - 1;
        self.len = last;
        if index == last {
            return; // what was added last goes first: nothing moves
        }
        let from = self.top.wrapping_add(last as usize);
        let to = if index >= self.first {
            self.top.wrapping_add(index as usize)
        } else {
            // SAFETY: below `len`, says the caller.
            unsafe { self.cell(index) }
        };
        // SAFETY: invariants 4 and 1: a cell of the segment, that was written.
        let moved = unsafe { *from };
        // SAFETY: the array's own memory.
        unsafe { *to = moved };
        // SAFETY: invariant 2: an entry, since there are no holes, and alive.
        unsafe { (*moved).set_index(index) };
    }

    /// Takes an entry out beside holes, or makes one, or moves the last of another segment.
    #[cold]
    #[inline(never)]
    fn remove_slow(&mut self, index: u32, may_move: bool) {
        if index == self.len - 1 {
            self.pop_last();
        } else if may_move {
            self.move_last_to(index);
        } else {
            self.make_hole(index);
        }
        if may_move && self.holes != 0 {
            // One more than this removal made: they end.
            let index = self.first_hole;
            self.unlink_hole(index);
            self.move_last_to(index);
        }
        self.select_last_segment();
    }

    /// Closes all holes: entries move.
    pub(crate) fn close_holes(&mut self) {
        while self.holes != 0 {
            let index = self.first_hole;
            self.unlink_hole(index);
            self.move_last_to(index);
        }
        self.select_last_segment();
    }

    /// Moves the last entry to the place `index` before it, where there is none.
    fn move_last_to(&mut self, index: u32) {
        let last = self.read(self.len - 1); // an entry, by invariant 1
        self.write(index, last);
        self.pop_last();
    }

    /// Writes an entry's cell, and its index.
    fn write(&mut self, index: u32, anchor: Cell) {
        self.write_cell(index, anchor);
        // SAFETY: invariant 2, of an entry that is there or about to be.
        unsafe { (*anchor).set_index(index) };
    }

    fn read(&self, index: u32) -> Cell {
        assert!(index < self.len);
        // SAFETY: just compared.
        let at = unsafe { self.cell(index) };
        // SAFETY: invariant 1.
        unsafe { *at }
    }

    fn write_cell(&mut self, index: u32, cell: Cell) {
        assert!(index < self.len);
        // SAFETY: just compared.
        let at = unsafe { self.cell(index) };
        // SAFETY: the array's own memory.
        unsafe { *at = cell };
    }

    /// Drops the last place, and the holes before it.
    fn pop_last(&mut self) {
        self.len -= 1;
        while self.len != 0 && is_hole(self.read(self.len - 1)) {
            self.unlink_hole(self.len - 1);
            self.len -= 1;
        }
    }

    fn make_hole(&mut self, index: u32) {
        let after = self.first_hole;
        self.write_cell(index, hole(NO_INDEX, after));
        if after != NO_INDEX {
            let (_, next) = neighbours(self.read(after));
            self.write_cell(after, hole(index, next));
        }
        self.first_hole = index;
        self.holes += 1;
    }

    fn unlink_hole(&mut self, index: u32) {
        let (before, after) = neighbours(self.read(index));
        if before == NO_INDEX {
            self.first_hole = after;
        } else {
            let (first, _) = neighbours(self.read(before));
            self.write_cell(before, hole(first, after));
        }
        if after != NO_INDEX {
            let (_, last) = neighbours(self.read(after));
            self.write_cell(after, hole(before, last));
        }
        self.holes -= 1;
    }

    /// What to allocate for one more entry, when there is no room.
    ///
    /// # Errors
    ///
    /// [`AllocError`], if there are as many entries as there can be.
    pub(crate) fn growth_size(&self) -> Result<GrowthSize, AllocError> {
        if self.capacity >= NO_INDEX - SEGMENT {
            return Err(AllocError::new());
        }
        let cells = match self.capacity {
            0 => FIRST_LEN,
            some if some < SEGMENT => (some * GROWTH).min(SEGMENT),
            _ => SEGMENT,
        };
        let full = self.segments.len() == self.segments.capacity();
        let directory = if full { 2 * self.segments.len() + 1 } else { 0 };
        Ok(GrowthSize { cells, directory })
    }

    /// Puts memory in, if it is what the array needs now: others may have grown it meanwhile. What
    /// is left in `growth` is to be dropped after the unlock.
    pub(crate) fn install(&mut self, growth: &mut Growth) {
        let Some(cells) = growth.segment.as_ref().map(|segment| segment.len) else { return };
        let replaces = self.capacity != 0 && self.capacity < SEGMENT;
        let fits =
            if replaces { cells > self.capacity } else { cells == SEGMENT || self.capacity == 0 };
        if !fits {
            return;
        }
        if !replaces && self.segments.len() == self.segments.capacity() {
            if growth.directory.capacity() <= self.segments.len() {
                return;
            }
            growth.directory.append(&mut self.segments); // has room: allocates nothing
            std::mem::swap(&mut growth.directory, &mut self.segments);
        }
        let Some(segment) = growth.segment.take() else { return };
        if replaces {
            let first = &mut self.segments[0];
            // SAFETY: both are the array's own, with room for `len` cells, and different.
            unsafe {
                ptr::copy_nonoverlapping(
                    first.cells.as_ptr(),
                    segment.cells.as_ptr(),
                    self.len as usize,
                );
            }
            growth.segment = Some(std::mem::replace(first, segment));
            self.capacity = cells;
        } else {
            self.segments.push(segment); // has room: allocates nothing
            self.capacity += cells;
        }
        self.select_segment();
    }

    /// True if there is a [`pop_surplus`](Self::pop_surplus), or perhaps one if no entry is left.
    #[inline(always)]
    pub(crate) fn may_shrink(&self) -> bool {
        self.capacity > 2 * SEGMENT && self.capacity - self.len >= 2 * SEGMENT
    }

    /// A segment to be dropped after the unlock: all but one of those that nothing is in.
    #[cold]
    #[inline(never)]
    pub(crate) fn pop_surplus(&mut self) -> Option<Segment> {
        let used = self.len.div_ceil(SEGMENT) as usize;
        if self.segments.len() <= used.max(1) + 1 {
            return None;
        }
        self.capacity -= SEGMENT;
        let surplus = self.segments.pop();
        self.select_segment();
        surplus
    }

    /// Checks the invariants.
    ///
    /// # Panics
    ///
    /// Panics with the one that does not hold.
    pub(crate) fn validate(&self) {
        let capacity: u32 = self.segments.iter().map(|segment| segment.len).sum();
        assert_eq!(self.capacity, capacity);
        assert!(self.len <= capacity);
        let whole = self.segments.iter().skip(1).all(|segment| segment.len == SEGMENT);
        assert!(whole && (self.segments.len() < 2 || self.segments[0].len == SEGMENT));
        if self.holes != 0 || self.segments.is_empty() {
            assert!(self.limit == 0 && self.first >= self.len);
        } else {
            let segment = &self.segments[(self.first / SEGMENT) as usize];
            assert_eq!(self.top.wrapping_add(self.first as usize), segment.cells.as_ptr());
            assert_eq!(self.limit, self.first + segment.len);
            assert!((self.first..=self.limit).contains(&self.len));
        }
        assert!(self.len == 0 || !is_hole(self.read(self.len - 1)), "the last place is a hole");
        let mut holes = 0;
        for index in 0..self.len {
            let cell = self.read(index);
            if is_hole(cell) {
                holes += 1;
            } else {
                // SAFETY: invariant 2: alive.
                assert_eq!(unsafe { (*cell).index() }, index, "an entry's index");
            }
        }
        assert_eq!(self.holes, holes);
        let (mut at, mut before) = (self.first_hole, NO_INDEX);
        while at != NO_INDEX {
            let cell = self.read(at);
            assert!(is_hole(cell) && neighbours(cell).0 == before && holes > 0);
            (before, at, holes) = (at, neighbours(cell).1, holes - 1);
        }
        assert_eq!(holes, 0, "a hole outside the list of holes");
    }
}

#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests;
