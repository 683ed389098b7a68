//! The safe way to embed a link.

/// Makes the values of a type items of intrusive lists, by the [`Link`](crate::Link) in one of its
/// fields.
///
/// ```
/// use std::pin::pin;
///
/// use percpu_list::{Domain, IntrusiveList, Link, linked};
///
/// struct Session {
///     name: String,
///     link: Link,
/// }
/// linked!(Session => link);
///
/// struct Tagged<T: Sync> {
///     tag: T,
///     link: Link,
/// }
/// linked!([T: Sync] Tagged<T> => link, drop = |this| println!("one of {} less", this.link.slot()));
///
/// let sessions = IntrusiveList::new();
/// let alice = pin!(Session { name: "alice".into(), link: Link::new(sessions.domain()) });
/// sessions.insert(alice.as_ref())?;
/// sessions.for_each(|session| assert_eq!(session.name, "alice"))?;
/// # let tagged = Tagged { tag: 1, link: Link::new(&Domain::new()) };
/// # assert_eq!(tagged.tag, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// It implements [`Linked`](crate::Linked); `Drop`, which unlinks before anything else and then calls
/// what stands after `drop =` with `&mut` the item; and it sees to it that the type is not `Unpin`.
/// So neither `Drop` nor `Unpin` can be implemented beside it:
///
/// ```compile_fail,E0119
/// struct Item(percpu_list::Link);
/// percpu_list::linked!(Item => 0);
/// impl Drop for Item {
///     fn drop(&mut self) {}
/// }
/// ```
///
/// ```compile_fail,E0119
/// struct Item(percpu_list::Link);
/// percpu_list::linked!(Item => 0);
/// impl Unpin for Item {}
/// ```
///
/// The field must be a `Link`:
///
/// ```compile_fail,E0308
/// struct Item(u64, percpu_list::Link);
/// percpu_list::linked!(Item => 0);
/// ```
///
/// ```compile_fail,E0308
/// struct Item(Box<percpu_list::Link>);
/// percpu_list::linked!(Item => 0);
/// ```
///
/// ```compile_fail,E0793
/// #[repr(packed)]
/// struct Item(u8, percpu_list::Link);
/// percpu_list::linked!(Item => 1);
/// ```
#[macro_export]
macro_rules! linked {
    ([$($generics:tt)*] $type:ty => $field:tt $(, drop = $hook:expr)? $(,)?) => {
        // SAFETY:
        // - The field is a `Link`, as `drop` below would not compile otherwise.
        // - `Unpin` is implemented below, under a condition that never holds.
        // - `Drop` unlinks first. Its `&mut self` is beside what walks read until then: only the link
        //   is used, by a shared reference, and as the type is not `Unpin` nothing is assumed of it.
        // - Safe code has neither `&mut` to what is pinned, nor another link for it.
        unsafe impl<$($generics)*> $crate::Linked for $type {
            const LINK: usize = ::core::mem::offset_of!(Self, $field);
        }

        impl<$($generics)*> ::core::ops::Drop for $type {
            fn drop(&mut self) {
                // Of this very type: a reference would also be made through `Deref`.
                let _: *const $crate::Link = &raw const self.$field;
                self.$field.unlink_in_drop();
                $(
                    let hook: fn(&mut Self) = $hook;
                    hook(self);
                )?
            }
        }

        $crate::linked!(@unpin [$($generics)*] $type);
    };
    (@unpin [] $type:ty) => {
        impl<'__pinned> ::core::marker::Unpin for $type
        where $crate::__private::Pinned<'__pinned>: ::core::marker::Unpin {}
    };
    (@unpin [$($generics:tt)+] $type:ty) => {
        impl<'__pinned, $($generics)+> ::core::marker::Unpin for $type
        where $crate::__private::Pinned<'__pinned>: ::core::marker::Unpin {}
    };
    ($type:ty => $field:tt $(, drop = $hook:expr)? $(,)?) => {
        $crate::linked!([] $type => $field $(, drop = $hook)?);
    };
}
