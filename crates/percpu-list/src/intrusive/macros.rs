//! The macro `linked!`, which embeds a link safely.

/// Makes the values of a type items of intrusive lists. The type has a field of type
/// [`Link`](crate::Link).
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
/// linked!([T: Sync] Tagged<T> => link, drop = |this| println!("removed from {}", this.link.slot()));
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
/// The macro implements [`Linked`](crate::Linked) and `Drop`, and makes the type `!Unpin`. `Drop`
/// first unlinks the item, and then calls the closure after `drop =` with a `&mut` to it. So the
/// program cannot implement `Drop` or `Unpin` for the type:
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
        // - The field is a `Link`, because `drop` below does not compile otherwise.
        // - The type is not `Unpin`, because `Unpin` is implemented below under a condition that
        //   never holds.
        // - `Drop` unlinks first. Until then it uses only the link, by a shared reference, while
        //   walks may read the item. The compiler does not assume that its `&mut self` is the only
        //   reference, because the type is not `Unpin`.
        // - Safe code can neither get `&mut` to a pinned item nor replace its link.
        unsafe impl<$($generics)*> $crate::Linked for $type {
            const LINK: usize = ::core::mem::offset_of!(Self, $field);
        }

        impl<$($generics)*> ::core::ops::Drop for $type {
            fn drop(&mut self) {
                // A raw pointer checks the exact type. A reference could also come from `Deref`.
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
