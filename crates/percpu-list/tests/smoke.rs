//! One thread: every operation of both lists does what it says.

use std::pin::Pin;
use std::sync::Arc;

use percpu_list::*;

#[test]
fn an_owning_list() {
    let list = PerCpuList::new();
    let mut entries: Vec<_> = (0..2000).map(|n| list.insert(Box::new(n)).unwrap()).collect();
    assert_eq!(list.len(), 2000);
    list.validate();
    let mut walk = list.iter();
    let first: Vec<i32> = walk.by_ref().take(10).map(|n| **n.unwrap()).collect();
    entries.retain(|entry| ***entry % 3 != 0);
    list.validate();
    let rest: Vec<i32> = walk.map(|n| **n.unwrap()).collect();
    for n in (0..2000).filter(|n| n % 3 != 0) {
        assert_eq!(first.iter().chain(&rest).filter(|&&m| m == n).count(), 1, "{n}");
    }
    let more: Vec<_> = (0..100).map(|n| list.insert(Box::new(-n)).unwrap()).collect();
    list.validate();
    drop(more);
    list.validate();
    assert_eq!(list.lock_all().unwrap().iter().count(), entries.len());
    list.for_each(|n| drop((**n < 9).then(|| entries.pop()))).unwrap();
    list.flush().unwrap();
    assert_eq!(list.len(), entries.len());
    list.close().unwrap();
    assert_eq!(list.insert(Box::new(7)).unwrap_err().value, Box::new(7));
    assert_eq!(list.drain().count(), entries.len());
    assert!(list.is_empty() && !entries.pop().unwrap().remove().unwrap());
    println!("{}", list.stats());
}

struct Item {
    n: i32,
    link: Link,
}
linked!(Item => link);

#[test]
fn an_intrusive_list() {
    let list = IntrusiveList::new();
    let mut items: Vec<Pin<Arc<Item>>> =
        (0..2000).map(|n| Arc::pin(Item { n, link: Link::new(list.domain()) })).collect();
    for item in &items {
        list.insert(item.as_ref()).unwrap();
        assert_eq!(list.insert(item.as_ref()), Err(Refused::Linked));
    }
    items.retain(|item| item.n % 2 == 0);
    list.validate();
    assert_eq!(list.len(), 1000);
    assert_eq!(list.remove(&items[0]), Ok(true));
    assert_eq!(list.remove(&items[0]), Ok(false));
    let last = CpuId::new(list.domain().slots() as u32 - 1);
    list.insert_on(last, items[0].as_ref()).unwrap();
    assert_eq!(items[0].link.slot(), last);
    list.validate();
    assert_eq!(list.retain(|item| item.n >= 100).unwrap(), 50);
    assert_eq!(list.lock_all().unwrap().iter().map(|item| item.n).min(), Some(100));
    drop(list);
    assert!(items.iter().all(|item| !item.link.is_linked()));
}
