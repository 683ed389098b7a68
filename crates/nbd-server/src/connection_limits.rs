//! Limits on the connections of the server and of each peer.
//!
//! A peer is a user (Unix sockets) or an address (TCP). The main thread admits each connection, and
//! passes its [`Permit`] to the worker that serves it. A connection is half-open until it has
//! finished its handshake.
//!
//! A worker frees the place of a connection when it handles the connection's end, which may be
//! after the main thread accepts the same client's next connection. So a connection that reaches a
//! limit waits ([`Waiting`]) for [`waits::PLACE`]. It is admitted if a place becomes free meanwhile.
//! Only then it takes the place of the oldest half-open one: clients within the limit evict no
//! handshake of each other while each worker is late by less than that, and silent connections do
//! not keep other clients out.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;
use std::{fmt, io};

use offlock_sync::Mutex;
use radix_ctx::Id;
use socket2::Socket;

use crate::notifier::{eventfd, notify};
use crate::waits;

/// The most connections of the server divided by the most half-open ones of a peer.
const SHARE: usize = 4;
/// Half-open connections that a peer may always have, for servers with a low limit.
/// Clients with several connections open them at the same time.
const ALWAYS: usize = 16;
/// Most connections that wait, of all peers. Each has a descriptor. A peer has at most as many places to
/// wait as it leaves to others, so one alone has half of them; its further connections evict or are
/// refused at once.
const MOST_WAITING: usize = 128;

/// The limits of one server, and the connections that count.
#[derive(Debug)]
pub(crate) struct ConnectionLimits {
    max: usize,
    max_half_open: usize,
    /// Made readable when the last connection ends, if any connection has finished its handshake.
    all_served: Option<Arc<OwnedFd>>,
    /// Made readable when a place becomes free, or a handshake ends, while connections wait.
    freed: Arc<OwnedFd>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// A connection was not admitted, and may wait for a place.
    has_waiting: bool,
    next_ticket: u64,
    /// The connections that have a place, by ticket: the oldest first.
    open: BTreeMap<u64, Place>,
    counts: HashMap<PeerKey, Counts>,
    /// A connection has finished its handshake.
    has_served: bool,
}

#[derive(Debug)]
struct Place {
    peer: PeerKey,
    is_half_open: bool,
    /// The connection and its worker, once a worker is chosen.
    location: Option<(Id, usize)>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    open: usize,
    half_open: usize,
}

/// The limit that refuses a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refused {
    #[error("the server has {0} connections, its limit")]
    Server(usize),
    #[error("the peer has {0} connections, its limit")]
    Peer(usize),
    #[error("the peer has {0} connections in their handshake, its limit")]
    HalfOpen(usize),
}

/// Permission for one connection. Dropping it frees the place.
#[derive(Debug)]
pub(crate) struct Permit {
    limits: Arc<ConnectionLimits>,
    pub(crate) peer: Peer,
    ticket: u64,
}

impl ConnectionLimits {
    /// Allows `max` connections. An address may have half of them, so that no single host can fill
    /// the server. A user may have all of them: by default only the owner and root reach the
    /// server's socket. `all_served` is an eventfd that is rung when the last connection ends.
    pub(crate) fn new(max: usize, all_served: Option<Arc<OwnedFd>>) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            max,
            max_half_open: (max / SHARE).max(ALWAYS),
            all_served,
            freed: eventfd()?,
            state: Mutex::default(),
        }))
    }

    /// Returns whether there is no connection.
    pub(crate) fn is_unused(&self) -> bool {
        self.state.lock().open.is_empty()
    }

    /// Returns the descriptor that is readable when a connection that waits may be admitted.
    pub(crate) fn freed(&self) -> &Arc<OwnedFd> {
        &self.freed
    }

    /// Admits a connection to a free place or, if it may evict, to that of a half-open one. Then
    /// also returns that one and its worker, for the caller to close it.
    pub(crate) fn admit(
        self: &Arc<Self>,
        peer: Peer,
        may_evict: bool,
    ) -> Result<(Permit, Option<(Id, usize)>), Refused> {
        let state = &mut *self.state.lock();
        let admitted = self.judge(state, peer, may_evict);
        state.has_waiting |= admitted.is_err(); // with the lock held, so that no release is missed
        admitted
    }

    fn judge(
        self: &Arc<Self>,
        state: &mut State,
        peer: Peer,
        may_evict: bool,
    ) -> Result<(Permit, Option<(Id, usize)>), Refused> {
        let key = peer.key();
        let counts = state.counts.get(&key).copied().unwrap_or_default();
        let max_per_peer = match key {
            PeerKey::User(_) => self.max,
            PeerKey::V4(_) | PeerKey::V6(_) | PeerKey::Unknown => self.max.div_ceil(2),
        };
        // At its own limit a peer evicts one of its own, even if the server has free places.
        let (refused, of) = if counts.open >= max_per_peer {
            (Some(Refused::Peer(max_per_peer)), Some(key))
        } else if counts.half_open >= self.max_half_open {
            (Some(Refused::HalfOpen(self.max_half_open)), Some(key))
        } else if state.open.len() >= self.max {
            let most = state.counts.iter().max_by_key(|(_, counts)| counts.half_open);
            (Some(Refused::Server(self.max)), most.map(|(&most, _)| most))
        } else {
            (None, None)
        };
        let evicted = of.filter(|_| may_evict).and_then(|of| state.evict(of));
        if let (Some(refused), None) = (refused, evicted) {
            return Err(refused);
        }
        let ticket = state.next_ticket;
        state.next_ticket += 1;
        state.open.insert(ticket, Place { peer: key, is_half_open: true, location: None });
        let counts = state.counts.entry(key).or_default();
        counts.open += 1;
        counts.half_open += 1;
        Ok((Permit { limits: Arc::clone(self), peer, ticket }, evicted))
    }
}

impl State {
    /// Evicts the peer's oldest half-open connection, and frees its place.
    fn evict(&mut self, peer: PeerKey) -> Option<(Id, usize)> {
        let may =
            |place: &Place| place.peer == peer && place.is_half_open && place.location.is_some();
        let oldest = self.open.iter().find(|(_, place)| may(place)).map(|(&ticket, _)| ticket);
        self.free(oldest?)?.location
    }

    /// Frees the place of a connection. Returns `None` if it was evicted.
    fn free(&mut self, ticket: u64) -> Option<Place> {
        let place = self.open.remove(&ticket)?;
        let counts = self.counts.entry(place.peer).or_default();
        counts.open -= 1;
        counts.half_open -= usize::from(place.is_half_open);
        if counts.open == 0 {
            self.counts.remove(&place.peer);
        }
        Some(place)
    }
}

impl Permit {
    /// Records the connection and its worker. From now on it may be evicted.
    pub(crate) fn set_location(&self, id: Id, worker: usize) {
        if let Some(place) = self.limits.state.lock().open.get_mut(&self.ticket) {
            place.location = Some((id, worker));
        }
    }

    /// Ends the handshake; the connection keeps its place. Returns `false` if it was evicted.
    pub(crate) fn finish_handshake(&mut self) -> bool {
        let state = &mut *self.limits.state.lock();
        let Some(place) = state.open.get_mut(&self.ticket) else { return false };
        if std::mem::replace(&mut place.is_half_open, false) {
            state.counts.entry(place.peer).or_default().half_open -= 1;
        }
        state.has_served = true;
        if state.has_waiting {
            notify(&self.limits.freed); // the peer may have one more half-open connection
        }
        true
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let state = &mut *self.limits.state.lock();
        state.free(self.ticket);
        if let (true, true, Some(fd)) =
            (state.open.is_empty(), state.has_served, &self.limits.all_served)
        {
            notify(fd);
        }
        if state.has_waiting {
            notify(&self.limits.freed);
        }
    }
}

/// The connections that have reached a limit and wait for a place, of the main thread.
#[derive(Debug)]
pub(crate) struct Waiting<S> {
    /// The oldest first.
    queue: VecDeque<Queued<S>>,
}

#[derive(Debug)]
struct Queued<S> {
    socket: S,
    peer: Peer,
    /// When the connection may evict another.
    until: Instant,
}

impl<S> Default for Waiting<S> {
    fn default() -> Self {
        Self { queue: VecDeque::new() }
    }
}

/// An admitted connection, and the half-open one that gives way to it.
pub(crate) type Admitted<S> = (S, Permit, Option<(Id, usize)>);

impl<S> Waiting<S> {
    /// Admits a connection, or lets it wait. `None` if it waits. If too many wait already, the new one may
    /// evict another at once, so that a crowd of silent clients does not keep it out.
    pub(crate) fn admit(
        &mut self,
        limits: &Arc<ConnectionLimits>,
        socket: S,
        peer: Peer,
        now: Instant,
    ) -> Option<Result<Admitted<S>, (Peer, Refused)>> {
        let its = self.queue.iter().filter(|one| one.peer.key() == peer.key()).count();
        let may_wait = its + self.queue.len() < MOST_WAITING;
        match limits.admit(peer, !may_wait) {
            Err(_) if may_wait => {
                self.queue.push_back(Queued { socket, peer, until: now + waits::PLACE });
                None
            }
            admitted => Some(match admitted {
                Ok((permit, evicted)) => Ok((socket, permit, evicted)),
                Err(reason) => Err((peer, reason)),
            }),
        }
    }

    /// Returns a waiting connection that is admitted, or that has waited long enough and found none
    /// to evict. `None` if the others go on waiting.
    pub(crate) fn next(
        &mut self,
        limits: &Arc<ConnectionLimits>,
        now: Instant,
    ) -> Option<Result<Admitted<S>, (Peer, Refused)>> {
        for at in 0..self.queue.len() {
            let Queued { peer, until, .. } = &self.queue[at];
            let (peer, may_evict) = (*peer, now >= *until);
            match limits.admit(peer, may_evict) {
                Err(_) if !may_evict => {}
                Err(reason) => {
                    drop(self.queue.remove(at));
                    return Some(Err((peer, reason)));
                }
                Ok((permit, evicted)) => {
                    return Some(Ok((self.queue.remove(at)?.socket, permit, evicted)));
                }
            }
        }
        limits.state.lock().has_waiting = !self.queue.is_empty();
        None
    }

    /// Returns when the first connection has waited long enough.
    pub(crate) fn until(&self) -> Option<Instant> {
        self.queue.iter().map(|one| one.until).min()
    }
}

/// The client of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Peer {
    Address(SocketAddr),
    /// A process that connected to a Unix socket. Its id is 0 if it is in another PID namespace.
    User {
        user: libc::uid_t,
        process: libc::pid_t,
    },
    /// The client is gone already.
    Unknown,
}

/// The key by which the limits count connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum PeerKey {
    User(libc::uid_t),
    V4(Ipv4Addr),
    /// A /64 network: one host may use any number of its addresses.
    V6([u8; 8]),
    Unknown,
}

impl Peer {
    pub(crate) fn of(socket: &Socket) -> Self {
        let Ok(address) = socket.peer_addr() else { return Self::Unknown };
        match address.as_socket() {
            Some(address) => Self::Address(address),
            None => credentials(socket).map_or(Self::Unknown, |credentials| Self::User {
                user: credentials.uid,
                process: credentials.pid,
            }),
        }
    }

    pub(crate) fn key(&self) -> PeerKey {
        match self {
            Self::User { user, .. } => PeerKey::User(*user),
            Self::Unknown => PeerKey::Unknown,
            Self::Address(address) => match address.ip().to_canonical() {
                IpAddr::V4(ip) => PeerKey::V4(ip),
                IpAddr::V6(ip) => PeerKey::V6(*ip.octets().first_chunk().expect("16 bytes")),
            },
        }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => f.pad(&address.to_string()),
            Self::User { process: pid @ 1.., .. } => f.pad(&format!("pid {pid}")),
            Self::User { .. } | Self::Unknown => f.pad("?"),
        }
    }
}

/// Returns the process and the user that connected to a Unix socket. Not by rustix's
/// `socket_peercred`, whose pid is never 0; that of a process in another PID namespace is.
fn credentials(socket: &Socket) -> io::Result<libc::ucred> {
    let mut cred = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: SO_PEERCRED stores one `ucred`, of the given size, and keeps no pointer to it.
    let ret = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut cred).cast(),
            &raw mut len,
        )
    };
    if ret == 0 { Ok(cred) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4};

    const A: Peer = Peer::User { user: 1, process: 1 };
    const C: Peer = Peer::User { user: 2, process: 1 };
    const B: Peer = Peer::Address(SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 1)));

    fn id(number: u64) -> Id {
        Id::from_bits(number + (1 << 32)).expect("an id")
    }

    /// Admits a connection with this number. Returns its permit, and the number of the connection
    /// that was evicted.
    fn admit(
        limits: &Arc<ConnectionLimits>,
        peer: Peer,
        number: u64,
    ) -> Result<(Permit, Option<u64>), Refused> {
        let (permit, evicted) = limits.admit(peer, true)?;
        permit.set_location(id(number), 0);
        Ok((permit, evicted.map(|(id, _)| id.to_bits() - (1 << 32))))
    }

    #[test]
    fn a_full_server_closes_the_oldest_half_open_connection_of_the_peer_with_most() {
        let limits = ConnectionLimits::new(4, None).unwrap();
        let mut first = admit(&limits, B, 0).unwrap().0;
        let mut half: Vec<_> = (1..4).map(|nr| admit(&limits, A, nr).unwrap().0).collect();
        let (mut other, evicted) = admit(&limits, B, 4).unwrap();
        assert_eq!(evicted, Some(1));
        assert!(!half[0].finish_handshake() && half[1].finish_handshake());
        assert!(first.finish_handshake() && other.finish_handshake());
        half.remove(0); // the place of an evicted connection is not freed twice
        let (mut last, evicted) = admit(&limits, C, 5).unwrap();
        assert_eq!(evicted, Some(3));
        assert!(last.finish_handshake());
        assert_eq!(admit(&limits, A, 6).unwrap_err(), Refused::Server(4));
        drop(first);
        assert_eq!(admit(&limits, A, 7).unwrap().1, None);
    }

    #[test]
    fn a_peer_has_its_limits() {
        let limits = ConnectionLimits::new(60, None).unwrap();
        let (mut permits, mut evicted) = (Vec::new(), Vec::new());
        for number in 0..50 {
            let (permit, out) = admit(&limits, B, number).unwrap();
            permits.push(permit);
            evicted.extend(out);
        }
        assert_eq!(evicted, (0..34).collect::<Vec<_>>(), "16 are half-open");
        let mut last = permits.split_off(34);
        assert!(
            last.iter_mut().all(Permit::finish_handshake)
                && !permits.iter_mut().any(Permit::finish_handshake)
        );
        let mut more: Vec<_> =
            (50..64).map(|number| admit(&limits, B, number).unwrap().0).collect();
        assert!(more.iter_mut().all(Permit::finish_handshake));
        assert_eq!(admit(&limits, B, 70).unwrap_err(), Refused::Peer(30));
        assert_eq!(admit(&limits, A, 71).unwrap().1, None);
        drop((permits, last, more));
        assert_eq!(limits.state.lock().counts.len(), 0);
    }

    #[test]
    fn the_last_connection_that_was_served_is_noticed() {
        let fd = crate::notifier::eventfd().unwrap();
        let limits = ConnectionLimits::new(4, Some(Arc::clone(&fd))).unwrap();
        let is_told = || rustix::io::read(&fd, &mut [0; 8]).is_ok();
        drop(limits.admit(A, true).unwrap());
        assert!(!is_told(), "a probe of the port ends nothing");
        let mut permits: Vec<_> = (0..2).map(|_| limits.admit(A, true).unwrap().0).collect();
        assert!(permits[0].finish_handshake());
        let mut permits = permits.into_iter();
        drop(permits.next());
        assert!(!is_told(), "another is in its handshake");
        drop(permits.next());
        assert!(is_told());
    }

    #[test]
    fn an_address_cannot_fill_the_server_by_default_and_a_user_can() {
        for (max, most) in [(1, 1), (4, 2), (5, 3)] {
            for (peer, most) in
                [(B, most), (Peer::Address((Ipv6Addr::from([1; 16]), 1).into()), most), (A, max)]
            {
                let limits = ConnectionLimits::new(max, None).unwrap();
                let mut permits: Vec<_> =
                    (0..most).map(|_| limits.admit(peer, true).unwrap().0).collect();
                assert!(permits.iter_mut().all(Permit::finish_handshake));
                assert!(limits.admit(peer, true).is_err(), "{peer:?} had {most} of {max}");
                assert_eq!(limits.admit(C, true).is_ok(), most < max);
            }
        }
    }

    #[test]
    fn a_refused_connection_waits_for_a_place_that_becomes_free() {
        let limits = ConnectionLimits::new(1, None).unwrap();
        let (mut waiting, now) = (Waiting::default(), Instant::now());
        let (_, mut first, _) = waiting.admit(&limits, 1, A, now).unwrap().unwrap();
        assert!(first.finish_handshake());
        assert!(
            waiting.admit(&limits, 2, A, now).is_none() && waiting.next(&limits, now).is_none()
        );
        assert_eq!(waiting.until(), Some(now + waits::PLACE));
        let is_told = || rustix::io::read(limits.freed(), &mut [0; 8]).is_ok();
        assert!(!is_told());
        drop(first);
        assert!(is_told());
        let (socket, mut second, evicted) = waiting.next(&limits, now).unwrap().unwrap();
        assert!((socket, evicted) == (2, None) && second.finish_handshake());
        assert!(waiting.next(&limits, now).is_none() && waiting.until().is_none());
        // One that gets no place is refused in the end, and a crowd does not grow.
        assert!(waiting.admit(&limits, 3, A, now).is_none());
        assert_eq!(
            waiting.next(&limits, now + waits::PLACE).unwrap().unwrap_err(),
            (A, Refused::Peer(1))
        );
        for socket in 0..MOST_WAITING / 2 {
            assert!(waiting.admit(&limits, socket, A, now).is_none());
        }
        let refused = waiting.admit(&limits, 0, A, now).unwrap();
        assert_eq!(refused.unwrap_err(), (A, Refused::Peer(1)));
    }

    /// Two clients that are within the limit end a connection and connect again. One of the new
    /// connections arrives before a worker frees the second old place.
    #[test]
    fn a_connection_waits_for_a_free_place_before_it_evicts_another() {
        let limits = ConnectionLimits::new(2, None).unwrap();
        let (mut waiting, now) = (Waiting::default(), Instant::now());
        let mut olds: Vec<_> = (0..2).map(|nr| admit(&limits, A, nr).unwrap().0).collect();
        assert!(olds.iter_mut().all(Permit::finish_handshake));
        olds.pop();
        let (_, mut first, _) = waiting.admit(&limits, 2, A, now).unwrap().unwrap();
        first.set_location(id(2), 0);
        assert!(waiting.admit(&limits, 3, A, now).is_none(), "it took a place in use");
        assert!(waiting.next(&limits, now + waits::PLACE / 2).is_none());
        olds.pop();
        let (socket, second, evicted) = waiting.next(&limits, now).unwrap().unwrap();
        second.set_location(id(3), 0);
        assert!((socket, evicted) == (3, None) && first.finish_handshake());
        // A half-open client that stays keeps others out for no longer than they wait.
        assert!(
            waiting.admit(&limits, 4, A, now).is_none() && waiting.next(&limits, now).is_none()
        );
        let (_, _third, evicted) = waiting.next(&limits, now + waits::PLACE).unwrap().unwrap();
        assert_eq!(evicted, Some((id(3), 0)));
    }

    #[test]
    fn a_handshake_that_ends_admits_a_peer_that_waits() {
        let limits = ConnectionLimits::new(100, None).unwrap();
        let (mut waiting, now) = (Waiting::default(), Instant::now());
        let half: Vec<_> = (0..25).map(|nr| admit(&limits, A, nr).unwrap().0).collect();
        assert!(waiting.admit(&limits, 25, A, now).is_none(), "a quarter of 100 is half-open");
        let mut half = half.into_iter();
        assert!(half.next().unwrap().finish_handshake());
        assert!(rustix::io::read(limits.freed(), &mut [0; 8]).is_ok(), "nothing told of it");
        let (socket, _permit, evicted) = waiting.next(&limits, now).unwrap().unwrap();
        assert_eq!((socket, evicted), (25, None));
    }

    #[test]
    fn a_crowd_leaves_places_to_wait_to_others() {
        let limits = ConnectionLimits::new(1, None).unwrap();
        let (mut waiting, now) = (Waiting::default(), Instant::now());
        let (mut first, _) = admit(&limits, A, 0).unwrap();
        assert!(first.finish_handshake());
        let mut crowd = |peer| {
            let admit = |socket: &usize| waiting.admit(&limits, *socket, peer, now).is_some();
            (0..).find(admit).expect("a limit")
        };
        assert_eq!([A, B, C, A].map(&mut crowd), [MOST_WAITING / 2, MOST_WAITING / 4, 16, 0]);
        drop(first);
        assert_eq!(waiting.next(&limits, now).unwrap().unwrap().0, 0, "the oldest is the first");
    }

    #[test]
    fn a_connection_that_finds_no_room_to_wait_evicts_at_once() {
        let limits = ConnectionLimits::new(1, None).unwrap();
        let (mut waiting, now) = (Waiting::default(), Instant::now());
        let (first, _) = admit(&limits, A, 0).unwrap();
        for socket in 0..MOST_WAITING / 2 {
            assert!(waiting.admit(&limits, socket, A, now).is_none());
        }
        let (_, _permit, evicted) = waiting.admit(&limits, 0, A, now).unwrap().unwrap();
        assert_eq!(evicted, Some((id(0), 0)));
        drop(first);
    }
}
