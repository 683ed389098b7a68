//! Memory from the system, in huge pages where it has some: at a few megabytes the CPU's own tables of
//! pages do not reach, and each hit would wait for a walk through the kernel's.

use std::marker::PhantomData;
use std::ops::Deref;
use std::ptr::{self, NonNull};

use percpu::AllocError;

/// Bytes of a huge page on most machines; on others this is alignment that does no harm.
const HUGE: usize = 2 << 20;

/// Anonymous memory, reserved. It is zero, and touched as it is used.
#[derive(Debug)]
pub(crate) struct Region {
    start: NonNull<u8>,
    mapped: NonNull<libc::c_void>,
    len: usize,
}

impl Region {
    /// So many bytes from a multiple of `align` on, which is a power of two.
    pub(crate) fn new(len: usize, align: usize) -> Result<Self, AllocError> {
        let align = if len >= HUGE { align.max(HUGE) } else { align };
        let len = len.checked_add(align).ok_or_else(AllocError::new)?;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice.
        let at = unsafe { libc::mmap(ptr::null_mut(), len, prot, flags, -1, 0) };
        if at == libc::MAP_FAILED {
            return Err(AllocError::new());
        }
        let mapped = NonNull::new(at).ok_or_else(AllocError::new)?;
        let skip = at.cast::<u8>().align_offset(align);
        // SAFETY: `align` bytes more than asked for were mapped.
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

    /// Whether the system is to use huge pages where it can. It need not, and nothing tells.
    pub(crate) fn set_huge(&self, huge: bool) {
        let advice = if huge { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
        // SAFETY: the mapping made in `new`; the advice changes nothing that can be read in it.
        let _ = unsafe { libc::madvise(self.mapped.as_ptr(), self.len, advice) };
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`; whoever looks at it borrows the owner.
        unsafe { libc::munmap(self.mapped.as_ptr(), self.len) };
    }
}

/// Values in a region of their own.
#[derive(Debug)]
pub(crate) struct Array<T> {
    region: Region,
    len: usize,
    of: PhantomData<T>,
}

// SAFETY: it owns its values, as a boxed slice does.
unsafe impl<T: Send> Send for Array<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Array<T> {}

impl<T> Array<T> {
    pub(crate) fn new(len: usize, mut make: impl FnMut() -> T) -> Result<Self, AllocError> {
        let bytes = len.checked_mul(size_of::<T>()).ok_or_else(AllocError::new)?;
        let region = Region::new(bytes, align_of::<T>())?;
        let mut array = Self { region, len: 0, of: PhantomData };
        while array.len < len {
            // SAFETY: below the length that the region has room for.
            let at = unsafe { array.start().add(array.len) };
            // SAFETY: memory of the region, aligned for it, that nobody else has.
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
        // SAFETY: so many values were written at the start of the region.
        unsafe { all.as_ref() }
    }
}

impl<T> Drop for Array<T> {
    fn drop(&mut self) {
        let all = NonNull::slice_from_raw_parts(self.start(), self.len);
        // SAFETY: written by `new`, and not looked at any more; the region goes after them.
        unsafe { all.drop_in_place() };
    }
}

/// So many copies of a value, on the heap.
pub(crate) fn boxed<T: Clone>(value: T, len: usize) -> Result<Box<[T]>, AllocError> {
    let mut values = Vec::new();
    values.try_reserve_exact(len).map_err(|_| AllocError::new())?;
    values.resize(len, value);
    Ok(values.into())
}

#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
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
            // SAFETY: so many bytes were asked for, and nobody writes.
            assert!(unsafe { bytes.as_ref() }.iter().all(|&byte| byte == 0));
        }
        assert!(Region::new(usize::MAX - 10, 4096).is_err());
        assert!(Region::new(1 << 60, 4096).is_err());
    }
}
