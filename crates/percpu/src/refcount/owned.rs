//! References that share ownership of their count, for threads and tasks that outlive a borrow.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc; // not `crate::sync::Arc`: only std's `Arc` can be a method receiver

use super::percpu_ref::PercpuRef;

/// An owned reference to an object whose references a [`PercpuRef`] counts; put when dropped.
///
/// [`PercpuRef::try_get_arc`] makes it. It may move to another thread or task. `clone` never fails.
///
/// ```
/// use std::sync::Arc;
/// use std::thread;
///
/// use offlock_percpu::{ArcReference, PercpuRef};
///
/// struct Request {
///     _connection: ArcReference,
/// }
///
/// let refs = Arc::new(PercpuRef::new(|| println!("released"))?);
/// let request = Request { _connection: refs.try_get_arc().expect("live") };
/// refs.kill()?;
/// thread::spawn(move || drop(request)).join().unwrap(); // the release closure runs here
/// assert!(refs.is_zero());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Panics
///
/// The drop of the last reference panics if the release closure does. On a thread that already
/// unwinds this aborts the process.
#[must_use = "dropping the reference puts it at once"]
pub struct ArcReference {
    /// The count; the drop puts one reference of it.
    refs: Arc<PercpuRef>,
}

impl PercpuRef {
    /// Takes a reference that owns a clone of the `Arc`, unless the object was killed.
    ///
    /// Fails when [`try_get`](Self::try_get) does. The clone and the drop of the `Arc` each write a
    /// cache line that all CPUs share. So take one owned reference per thread or task, and use
    /// `try_get` where references come and go often.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use offlock_percpu::PercpuRef;
    ///
    /// let refs = Arc::new(PercpuRef::new(|| println!("released"))?);
    /// let user = refs.try_get_arc().expect("live");
    /// refs.kill()?;
    /// assert!(refs.try_get_arc().is_none(), "no new users");
    /// std::thread::spawn(move || drop(user)).join().unwrap(); // prints
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline]
    #[must_use = "dropping the reference puts it at once"]
    pub fn try_get_arc(self: &Arc<Self>) -> Option<ArcReference> {
        // `ManuallyDrop`: the `ArcReference` puts the reference.
        let _counted = ManuallyDrop::new(self.try_get()?);
        Some(ArcReference { refs: Arc::clone(self) })
    }
}

impl Clone for ArcReference {
    #[inline]
    fn clone(&self) -> Self {
        let refs = Arc::clone(&self.refs);
        refs.get_more();
        Self { refs }
    }
}

impl Drop for ArcReference {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: `refs` keeps the `PercpuRef` alive until after this call, even if the release
        // closure panics. Only this drop puts the reference that `try_get_arc` or `clone` took.
        unsafe { PercpuRef::put(Arc::as_ptr(&self.refs)) };
    }
}

impl fmt::Debug for ArcReference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ArcReference").field(&*self.refs).finish()
    }
}
