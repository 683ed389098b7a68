//! References that own their count: for threads and tasks that outlive the borrow.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc; // not the facade's: a method needs std's `Arc` as its receiver

use super::percpu_ref::PercpuRef;

/// An owned reference to what a [`PercpuRef`] counts; put when dropped.
///
/// Made by [`PercpuRef::try_get_arc`]. It keeps the `PercpuRef` allocated, so it may move into
/// another thread or into a task, and may be dropped there. `clone` never fails.
///
/// # Panics
///
/// Its drop, with the panic of the release closure, if this is the last reference. On a thread that
/// unwinds already that aborts the process.
#[must_use = "dropping the reference puts it at once"]
pub struct ArcReference {
    /// Holds one reference of the count, which the drop puts.
    refs: Arc<PercpuRef>,
}

impl PercpuRef {
    /// Takes a reference that owns a share of the `Arc`, unless the object was killed.
    ///
    /// It refuses when [`try_get`](Self::try_get) does. The clone and the drop of the `Arc` each
    /// write the cache line of its count, which all CPUs share: take one for a thread or a task, and
    /// borrow with `try_get` where references come and go often.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use std::sync::mpsc;
    /// use std::thread;
    ///
    /// use percpu::PercpuRef;
    ///
    /// let (tell, told) = mpsc::channel();
    /// let refs = Arc::new(PercpuRef::new(move || tell.send("released").unwrap())?);
    ///
    /// let user = refs.try_get_arc().expect("live");
    /// let worker = thread::spawn(move || {
    ///     // ... uses the object ...
    ///     drop(user);
    /// });
    /// refs.kill()?;
    /// assert!(refs.try_get_arc().is_none(), "no new users");
    /// worker.join().unwrap();
    /// assert_eq!(told.try_recv(), Ok("released"));
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
        // SAFETY: `refs` keeps it alive until after this call, also if the release closure panics,
        // and the reference that `try_get_arc` or `clone` counted is put once, here.
        unsafe { PercpuRef::put(Arc::as_ptr(&self.refs)) };
    }
}

impl fmt::Debug for ArcReference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ArcReference").field(&*self.refs).finish()
    }
}

/// It may cross threads and await points, and be kept in a `static`.
const _: () = {
    const fn owned<T: Send + Sync + 'static>() {}
    owned::<ArcReference>();
};
