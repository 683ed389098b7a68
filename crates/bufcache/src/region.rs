//! Memory mapped from the system, in huge pages where possible.
//!
//! Beyond a few megabytes the TLB does not cover a cache in pages of 4 KiB, and each hit would wait
//! for a page walk.

use std::marker::PhantomData;
use std::ops::Deref;
use std::ptr::{self, NonNull};

use offlock_percpu::AllocError;

/// The size of a huge page on most machines. On others it is an alignment that does no harm.
const HUGE: usize = 2 << 20;

/// A reserved anonymous mapping. It reads as zeros, and the system backs it with memory at first
/// use.
#[derive(Debug)]
pub(crate) struct Region {
    start: NonNull<u8>,
    mapped: NonNull<libc::c_void>,
    len: usize,
}

impl Region {
    /// Maps `len` bytes, aligned to `align`, a power of two.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if the system refuses the mapping or the length overflows.
    pub(crate) fn new(len: usize, align: usize) -> Result<Self, AllocError> {
        let align = if len >= HUGE { align.max(HUGE) } else { align };
        let len = len.checked_add(align).ok_or_else(AllocError::new)?;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new anonymous mapping at an address that the kernel chooses overlaps no other.
        let at = unsafe { libc::mmap(ptr::null_mut(), len, prot, flags, -1, 0) };
        if at == libc::MAP_FAILED {
            return Err(AllocError::new());
        }
        let mapped = NonNull::new(at).ok_or_else(AllocError::new)?;
        let skip = at.cast::<u8>().align_offset(align);
        // SAFETY: `len` includes `align` bytes more than asked for, and `skip` is less than
        // `align`.
        let start = unsafe { mapped.cast::<u8>().add(skip) };
        let region = Self { start, mapped, len };
        if align >= HUGE {
            region.set_huge(true);
        }
        Ok(region)
    }

    #[inline(always)]
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Advises the system to use huge pages, or not to. The system may ignore the advice.
    pub(crate) fn set_huge(&self, huge: bool) {
        let advice = if huge { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
        // SAFETY: the range is the mapping made in `new`, and the advice does not change its
        // contents.
        let _ = unsafe { libc::madvise(self.mapped.as_ptr(), self.len, advice) };
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the range is the mapping made in `new`. References into it borrow the owner of
        // this region, which is being dropped.
        unsafe { libc::munmap(self.mapped.as_ptr(), self.len) };
    }
}

/// A fixed array of values in a region.
#[derive(Debug)]
pub(crate) struct Array<T> {
    region: Region,
    len: usize,
    of: PhantomData<T>,
}

// SAFETY: the array owns its values and its region, as a boxed slice owns its memory.
unsafe impl<T: Send> Send for Array<T> {}
// SAFETY: a shared array gives out shared references to its values only.
unsafe impl<T: Sync> Sync for Array<T> {}

impl<T> Array<T> {
    /// Makes an array of `len` values, each from one call of `make`.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if there is no memory for the region.
    pub(crate) fn new(len: usize, mut make: impl FnMut() -> T) -> Result<Self, AllocError> {
        let bytes = len.checked_mul(size_of::<T>()).ok_or_else(AllocError::new)?;
        let region = Region::new(bytes, align_of::<T>())?;
        let mut array = Self { region, len: 0, of: PhantomData };
        while array.len < len {
            // SAFETY: `array.len` is less than `len`, for which the region has room.
            let at = unsafe { array.start().add(array.len) };
            // SAFETY: `at` is in the region, aligned for `T`, and only this function uses it yet.
            unsafe { at.write(make()) };
            array.len += 1;
        }
        Ok(array)
    }

    #[inline(always)]
    fn start(&self) -> NonNull<T> {
        self.region.start().cast()
    }
}

impl<T> Deref for Array<T> {
    type Target = [T];

    #[inline(always)]
    fn deref(&self) -> &[T] {
        let all = NonNull::slice_from_raw_parts(self.start(), self.len);
        // SAFETY: `new` wrote `len` values at the start of the region.
        unsafe { all.as_ref() }
    }
}

impl<T> Drop for Array<T> {
    fn drop(&mut self) {
        let all = NonNull::slice_from_raw_parts(self.start(), self.len);
        // SAFETY: `new` wrote `len` values, to which no reference is left. The region is unmapped
        // after this.
        unsafe { all.drop_in_place() };
    }
}

/// Returns `len` copies of a value on the heap, or an error if there is no memory.
pub(crate) fn boxed<T: Clone>(value: T, len: usize) -> Result<Box<[T]>, AllocError> {
    let mut values = Vec::new();
    values.try_reserve_exact(len).map_err(|_| AllocError::new())?;
    values.resize(len, value);
    Ok(values.into())
}

#[cfg(all(test, not(offlock_model)))]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use super::*;

    #[test]
    fn an_array_has_its_values_and_drops_each_once() {
        let dropped = Rc::new(Cell::new(0));
        struct Counts(Rc<Cell<u32>>, usize);
        impl Drop for Counts {
            fn drop(&mut self) {
                self.0.set(self.0.get() + 1);
            }
        }
        let mut next = 0;
        let make = || {
            next += 1;
            Counts(Rc::clone(&dropped), next)
        };
        let array = Array::new(1000, make).unwrap();
        assert!(array.iter().enumerate().all(|(at, value)| value.1 == at + 1));
        assert_eq!(dropped.get(), 0);
        drop(array);
        assert_eq!(dropped.get(), 1000);
    }

    #[test]
    fn a_region_is_aligned_zero_and_refused_where_it_cannot_be() {
        for (len, align) in [(4096, 512), (100_000, 65_536), (3 * HUGE, 4096)] {
            let region = Region::new(len, align).unwrap();
            assert_eq!(region.start().addr().get() % align, 0);
            let bytes = NonNull::slice_from_raw_parts(region.start(), len);
            // SAFETY: the region has `len` bytes, and no other reference to them exists.
            assert!(unsafe { bytes.as_ref() }.iter().all(|&byte| byte == 0));
        }
        assert!(Region::new(usize::MAX - 10, 4096).is_err());
        assert!(Region::new(1 << 60, 4096).is_err());
    }
}
