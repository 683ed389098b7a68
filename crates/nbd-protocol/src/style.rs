//! The forms of the headers in the transmission phase, and the policy for TLS.

/// The headers that both sides use after the handshake.
///
/// A later style contains what an earlier one offers: extended headers imply structured replies.
///
/// # Examples
///
/// ```
/// use nbd_protocol::HeaderStyle;
///
/// assert!(HeaderStyle::Extended.has_chunks());
/// assert_eq!(HeaderStyle::Structured.request_len(), 28);
/// assert_eq!(HeaderStyle::Extended.request_len(), 32);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HeaderStyle {
    /// Compact requests, simple replies.
    #[default]
    Simple,
    /// Compact requests; READ and BLOCK_STATUS are answered in structured reply chunks
    /// (`NBD_OPT_STRUCTURED_REPLY`).
    Structured,
    /// Requests and reply chunks with 64-bit lengths (`NBD_OPT_EXTENDED_HEADERS`).
    Extended,
}

impl HeaderStyle {
    /// Returns whether a READ is answered in chunks.
    #[must_use]
    pub const fn has_chunks(self) -> bool {
        !matches!(self, Self::Simple)
    }

    /// Returns whether lengths have 64 bits.
    #[must_use]
    pub const fn is_extended(self) -> bool {
        matches!(self, Self::Extended)
    }

    /// Returns the length of a request header in bytes.
    #[must_use]
    pub const fn request_len(self) -> usize {
        if self.is_extended() { 32 } else { 28 }
    }
}

/// The policy of one side for TLS (`NBD_OPT_STARTTLS`).
///
/// The crate does no cryptography: it says when TLS starts
/// ([`Step::StartTls`](crate::Step::StartTls), [`ClientStep::StartTls`](crate::ClientStep::StartTls))
/// and refuses what the policy forbids.
///
/// # Examples
///
/// ```
/// use nbd_protocol::{ClientHandshake, Handshake, HeaderStyle, TlsPolicy};
///
/// let server = Handshake::new(&mut Vec::new()).tls(TlsPolicy::Require);
/// let client = ClientHandshake::new("disk", HeaderStyle::Structured).tls(TlsPolicy::Require);
/// # drop((server, client));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum TlsPolicy {
    /// Never: a server refuses STARTTLS, a client does not ask.
    #[default]
    Off,
    /// TLS if the other side wants it. A client asks, and continues in plaintext if it is refused, so an
    /// attacker between the two can prevent TLS.
    On,
    /// Always: a server answers nothing else before, a client ends the handshake if it is refused.
    Require,
}
