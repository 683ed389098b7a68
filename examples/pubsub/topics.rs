//! The topics: each is a per-CPU list of the ids of its subscribers.
//!
//! The lists share the locks of one domain, so a topic costs 8 bytes for each CPU until it has a
//! subscriber there. The map of topics has a lock of its own: a subscription to a topic that exists takes it
//! shared, and writes only to the list of the CPU that it runs on.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use percpu_list::{ArcEntry, Domain, InsertError, PerCpuList, Refused};
use radix_ctx::Id;

/// The subscribers of a topic.
pub(crate) type Subscribers = PerCpuList<Id>;

/// A subscription; the drop ends it. Pass it to `Topics::unsubscribe` so that an empty topic is freed.
pub(crate) type Subscription = ArcEntry<Id>;

/// The topics that have subscribers.
#[derive(Debug)]
pub(crate) struct Topics {
    domain: Domain,
    map: RwLock<Map>,
}

#[derive(Debug, Default)]
struct Map {
    lists: HashMap<Arc<str>, Arc<Subscribers>>,
    /// Set once the topics have ended.
    ended: bool,
}

impl Topics {
    pub(crate) fn new() -> io::Result<Topics> {
        Ok(Topics { domain: Domain::try_new()?, map: RwLock::default() })
    }

    /// Adds a subscriber to a topic, which is made if it has none.
    pub(crate) fn subscribe(&self, topic: &str, id: Id) -> Result<Subscription, Refused> {
        {
            // The insert is under the lock, because an empty list is removed under the exclusive lock.
            let map = self.read();
            if let Some(list) = map.lists.get(topic) {
                return list.insert_arc(id).map_err(Refused::from);
            }
        }
        let mut map = self.write();
        if map.ended {
            return Err(Refused::Closed);
        }
        let list = match map.lists.get(topic) {
            Some(list) => list,
            None => {
                let list = Arc::new(PerCpuList::try_new_in(&self.domain)?);
                map.lists.entry(topic.into()).or_insert(list)
            }
        };
        list.insert_arc(id).map_err(|InsertError { reason, .. }| reason)
    }

    /// Ends a subscription, and frees the topic if that was the last one.
    pub(crate) fn unsubscribe(&self, topic: &str, subscription: Subscription) {
        drop(subscription);
        if self.subscribers(topic).is_some_and(|list| list.is_empty()) {
            let mut map = self.write();
            // Another client may have subscribed meanwhile; under this lock no client can.
            if map.lists.get(topic).is_some_and(|list| list.is_empty()) {
                map.lists.remove(topic);
            }
        }
    }

    /// Returns the subscribers of a topic, or `None` if it has none.
    pub(crate) fn subscribers(&self, topic: &str) -> Option<Arc<Subscribers>> {
        self.read().lists.get(topic).cloned()
    }

    /// Ends every topic, and calls `tell` for each subscription. Subscriptions are refused from now on.
    pub(crate) fn end(&self, mut tell: impl FnMut(&Arc<str>, Id)) -> io::Result<()> {
        let lists = {
            let mut map = self.write();
            map.ended = true;
            std::mem::take(&mut map.lists)
        };
        for (topic, list) in lists {
            // Off the list, so that a publisher that walks it just now does not come after the notice.
            for subscriber in list.drain() {
                tell(&topic, *subscriber?);
            }
        }
        Ok(())
    }

    fn read(&self) -> RwLockReadGuard<'_, Map> {
        self.map.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Map> {
        self.map.write().unwrap_or_else(PoisonError::into_inner)
    }
}
