//! A dense array of pointers to anchors, in segments that never move.
//!
//! ```text
//!  segments -> | 512 cells | 512 cells | 512 cells      |
//!                ^ 0                     ^ 1024     ^ len
//!  cell        -> an anchor, whose `index` is the index of the cell
//!              or a hole: the indexes of the previous and the next hole
//! ```
//!
//! A removal moves the last entry into the free cell, so a walk reads no holes. While a walk has
//! released the lock, entries must not move, because the walk would miss an entry that moves to an
//! index before its position. In that time a removal leaves a hole, and an insertion fills one.
//! Each later removal closes one of the holes that are left. Every operation takes a constant
//! number of steps, except that holes at the end are popped, once each.
//!
//! The array grows in two steps, so that no memory is allocated under a lock:
//! [`Array::growth_size`] returns what to allocate, and [`Array::install`] adds it.
//!
//! # Invariants
//!
//! 1. Every cell below `len` is an entry or a hole. The last of them is an entry.
//! 2. The anchor of an entry is alive, and its index is that of the cell.
//! 3. `holes` cells are holes, in one doubly linked list that begins at `first_hole`.
//! 4. One segment is selected: `first` is its first index, and `top.wrapping_add(i)` is its cell of
//!    index `i`. If there are no holes, `len < limit` means that the next entry goes into that
//!    segment, and `first < len` means that the last entry is in it. If there are holes, both are
//!    false.
//! 5. Every segment after the first has [`SEGMENT`] cells. So has the first, if there is a second.

use std::alloc::{Layout, alloc, dealloc};
use std::ptr::{self, NonNull};

use offlock_percpu::AllocError;

use crate::anchor::Anchor;

/// The number of cells in a segment: a page of them. The models use small segments, so that they
/// see an array grow and shrink.
pub(crate) const SEGMENT: u32 = if cfg!(offlock_model) { 2 } else { 512 };
/// The number of cells in the first segment of a short list, and the factor by which it grows. Both
/// are guesses.
const FIRST_LEN: u32 = if cfg!(offlock_model) { 1 } else { 8 };
const GROWTH: u32 = 4;

/// Marks the end of the list of holes. It is larger than every index.
const NO_INDEX: u32 = (1 << 31) - 1;

/// A pointer to an anchor, or an odd address that encodes the previous and the next hole.
type Cell = *mut Anchor;

fn hole(before: u32, after: u32) -> Cell {
    ptr::without_provenance_mut((before as usize) << 32 | (after as usize) << 1 | 1)
}

fn is_hole(cell: Cell) -> bool {
    cell.addr() & 1 == 1
}

/// Returns the indexes of the previous and the next hole.
fn neighbours(cell: Cell) -> (u32, u32) {
    ((cell.addr() >> 32) as u32, (cell.addr() >> 1) as u32 & NO_INDEX)
}

/// Uninitialised memory for cells; freed on drop.
#[derive(Debug)]
pub(crate) struct Segment {
    cells: NonNull<Cell>,
    len: u32,
}

impl Segment {
    fn layout(len: u32) -> Layout {
        // `SEGMENT` pointers or fewer do not overflow, so the default is not used.
        Layout::array::<Cell>(len as usize).unwrap_or(Layout::new::<Cell>())
    }

    fn allocate(len: u32) -> Result<Self, AllocError> {
        // SAFETY: the layout has a size, because `Array::growth_size` never returns 0 cells.
        let cells = unsafe { alloc(Self::layout(len)) };
        Ok(Self { cells: NonNull::new(cells.cast()).ok_or_else(AllocError::new)?, len })
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: `allocate` allocated the memory with this layout.
        unsafe { dealloc(self.cells.as_ptr().cast(), Self::layout(self.len)) };
    }
}

/// The sizes to allocate for an array that has no room.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GrowthSize {
    cells: u32,
    directory: usize,
}

/// Memory for an array that has no room. After [`Array::install`], the memory that it does not
/// need.
#[derive(Debug)]
pub(crate) struct Growth {
    segment: Option<Segment>,
    directory: Vec<Segment>,
}

impl Growth {
    /// Allocates the memory. The caller holds no lock.
    pub(crate) fn allocate(size: GrowthSize) -> Result<Self, AllocError> {
        let mut directory = Vec::new();
        directory.try_reserve_exact(size.directory).map_err(|_| AllocError::new())?;
        Ok(Self { segment: Some(Segment::allocate(size.cells)?), directory })
    }
}

/// The entries of one list in one slot. Only the thread that holds the lock of the slot uses it.
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

// SAFETY: anchors are `Send` and `Sync`, and live until they are removed (invariant 2).
unsafe impl Send for Array {}

impl Array {
    /// The number of bytes, from the start of an array, that insertions and removals write.
    #[cfg(not(offlock_model))]
    pub(crate) const WRITTEN: usize = std::mem::offset_of!(Self, segments);

    /// Creates an empty array, which allocates nothing.
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

    /// Returns the number of entries and holes. Every index is below it.
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// Returns the number of entries.
    pub(crate) fn entries(&self) -> u32 {
        self.len - self.holes
    }

    /// Returns whether [`insert`](Self::insert) may be called.
    #[inline(always)]
    pub(crate) fn has_room(&self) -> bool {
        self.len < self.limit || self.holes != 0 || self.len < self.capacity
    }

    /// # Safety
    ///
    /// `index` is below `capacity`.
    #[inline(always)]
    unsafe fn cell(&self, index: u32) -> *mut Cell {
        // SAFETY: there is a segment for every `SEGMENT` cells below `capacity`, and by the
        // contract of this function `index` is below it.
        let segment = unsafe { self.segments.get_unchecked((index / SEGMENT) as usize) };
        // SAFETY: by invariant 5 the segment has a cell of this index, which is below `capacity`.
        unsafe { segment.cells.as_ptr().add((index % SEGMENT) as usize) }
    }

    /// Returns the entry at `index`, or `None` for a hole and for an index past the end.
    #[inline]
    pub(crate) fn get(&self, index: u32) -> Option<NonNull<Anchor>> {
        if index >= self.len {
            return None;
        }
        // SAFETY: `index` is below `len`, so below `capacity`.
        let at = unsafe { self.cell(index) };
        // SAFETY: by invariant 1 the cell was written.
        let cell = unsafe { *at };
        if is_hole(cell) { None } else { NonNull::new(cell) }
    }

    /// Returns the last entry.
    #[inline]
    pub(crate) fn last(&self) -> Option<NonNull<Anchor>> {
        self.get(self.len.checked_sub(1)?)
    }

    /// Calls `f` with every entry, by ascending index.
    #[inline]
    pub(crate) fn for_each(&self, mut f: impl FnMut(NonNull<Anchor>)) {
        let mut left = self.len as usize;
        for segment in &self.segments {
            let here = left.min(segment.len as usize);
            // SAFETY: by invariant 1 these cells were written. `&self` excludes changes.
            let cells = unsafe { std::slice::from_raw_parts(segment.cells.as_ptr(), here) };
            for &cell in cells {
                if let (false, Some(anchor)) = (is_hole(cell), NonNull::new(cell)) {
                    f(anchor);
                }
            }
            left -= here;
        }
    }

    /// Restores invariant 4. Selects the segment of the next index, or the last segment if that one
    /// does not exist.
    fn select_segment(&mut self) {
        let Some(newest) = self.segments.len().checked_sub(1) else { return };
        self.select((self.len / SEGMENT).min(newest as u32));
    }

    /// Restores invariant 4 after a removal. Selects the segment of the last index, because another
    /// removal is as likely as an insertion.
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
        let dense = self.holes == 0;
        (self.first, self.limit) = if dense { (first, first + segment.len) } else { (u32::MAX, 0) };
    }

    /// Inserts an entry, and stores its index.
    ///
    /// # Safety
    ///
    /// [`has_room`](Self::has_room) is true. The anchor is in no array, and stays alive and in
    /// place until it is removed.
    #[inline(always)]
    pub(crate) unsafe fn insert(&mut self, anchor: NonNull<Anchor>) {
        let index = self.len;
        if index >= self.limit {
            return self.insert_slow(anchor);
        }
        let at = self.top.wrapping_add(index as usize);
        // SAFETY: `index` is below `limit`, so by invariant 4 this is a cell of the selected
        // segment.
        unsafe { *at = anchor.as_ptr() };
        self.len = index + 1;
        // SAFETY: by the contract of this function the anchor is alive.
        unsafe { anchor.as_ref() }.set_index(index);
    }

    /// Inserts an entry into a hole, or into another segment.
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

    /// Removes the entry at `index`, but does not change the index that the anchor stores. Moves
    /// other entries only if `may_move` is true.
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
            return; // the removed entry was the last, so no entry moves
        }
        let from = self.top.wrapping_add(last as usize);
        let to = if index >= self.first {
            self.top.wrapping_add(index as usize)
        } else {
            // SAFETY: by the contract of this function `index` is below `len`, so below `capacity`.
            unsafe { self.cell(index) }
        };
        // SAFETY: by invariant 4 this is a cell of the selected segment, and by invariant 1 it was
        // written.
        let moved = unsafe { *from };
        // SAFETY: `to` is a cell of the array, either of the selected segment or from `cell`.
        unsafe { *to = moved };
        // SAFETY: there are no holes, so the cell was an entry, whose anchor is alive (invariant
        // 2).
        unsafe { (*moved).set_index(index) };
    }

    /// Removes an entry where there are holes, where entries must not move, or where the last entry
    /// is in another segment.
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
            // This removal made no hole and closes one, so the holes come to an end.
            let index = self.first_hole;
            self.unlink_hole(index);
            self.move_last_to(index);
        }
        self.select_last_segment();
    }

    /// Moves the last entry to the free cell at `index`, which is before it.
    fn move_last_to(&mut self, index: u32) {
        let last = self.read(self.len - 1); // an entry, by invariant 1
        self.write(index, last);
        self.pop_last();
    }

    /// Writes an entry to the cell at `index`, and stores the index in the anchor.
    fn write(&mut self, index: u32, anchor: Cell) {
        self.write_cell(index, anchor);
        // SAFETY: the anchor is alive: it is an entry (invariant 2), or becomes one by the contract
        // of `insert`.
        unsafe { (*anchor).set_index(index) };
    }

    fn read(&self, index: u32) -> Cell {
        assert!(index < self.len);
        // SAFETY: `index` is below `len`, so below `capacity`.
        let at = unsafe { self.cell(index) };
        // SAFETY: by invariant 1 the cell was written.
        unsafe { *at }
    }

    fn write_cell(&mut self, index: u32, cell: Cell) {
        assert!(index < self.len);
        // SAFETY: `index` is below `len`, so below `capacity`.
        let at = unsafe { self.cell(index) };
        // SAFETY: `at` is a cell of the array, and `&mut self` excludes other uses.
        unsafe { *at = cell };
    }

    /// Removes the last cell, and the holes directly before it.
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

    /// Returns the sizes to allocate for one more entry. The array has no room.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if the array has the largest possible capacity.
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

    /// Adds the memory in `growth`, if it fits. Another thread may have grown the array after the
    /// sizes were computed. The caller drops `growth`, and the memory left in it, after the unlock.
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
            growth.directory.append(&mut self.segments); // has the capacity, so allocates nothing
            std::mem::swap(&mut growth.directory, &mut self.segments);
        }
        let Some(segment) = growth.segment.take() else { return };
        if replaces {
            let first = &mut self.segments[0];
            // SAFETY: both segments have at least `len` cells, and they are separate allocations.
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
            self.segments.push(segment); // has the capacity, so allocates nothing
            self.capacity += cells;
        }
        self.select_segment();
    }

    /// Returns whether [`pop_surplus`](Self::pop_surplus) returns a segment. For an empty array it
    /// may be wrong.
    #[inline(always)]
    pub(crate) fn may_shrink(&self) -> bool {
        self.capacity > 2 * SEGMENT && self.capacity - self.len >= 2 * SEGMENT
    }

    /// Removes an unused segment, if there are two or more. The caller drops it after the unlock.
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
    /// Panics if an invariant does not hold.
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
        assert!(self.len == 0 || !is_hole(self.read(self.len - 1)), "the last cell is a hole");
        let mut holes = 0;
        for index in 0..self.len {
            let cell = self.read(index);
            if is_hole(cell) {
                holes += 1;
            } else {
                // SAFETY: by invariant 2 the anchor is alive.
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

#[cfg(all(test, not(offlock_model)))]
mod tests;
