//! The numbers on the wire: magics, option and reply types, flags. All fields are big-endian.

use std::fmt;
use std::ops::{BitAnd, BitOr, BitOrAssign, Sub};

/// Largest payload of one READ or WRITE, in bytes; advertised as the maximum block size.
///
/// The protocol asks servers not to treat up to 32 MiB as an attack.
pub const MAX_PAYLOAD: u32 = 32 << 20;

/// Longest string (export name, description, error message), in bytes. Set by the protocol.
pub const MAX_STRING: usize = 4096;

/// First eight bytes a server sends: `NBDMAGIC`.
pub const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Second eight bytes a newstyle server sends, and the start of every option: `IHAVEOPT`.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Start of every reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Start of every request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Start of every simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Start of every chunk of a structured reply.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// Start of every request with an extended header.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// Start of every reply chunk with an extended header.
pub const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Handshake flag: the server speaks fixed newstyle.
pub const FLAG_FIXED_NEWSTYLE: u16 = 1 << 0;
/// Handshake flag: the server can leave out the 124 zeroes after `EXPORT_NAME`.
pub const FLAG_NO_ZEROES: u16 = 1 << 1;
/// Client flag: the client speaks fixed newstyle.
pub const FLAG_C_FIXED_NEWSTYLE: u32 = 1 << 0;
/// Client flag: the server shall leave out the 124 zeroes after `EXPORT_NAME`.
pub const FLAG_C_NO_ZEROES: u32 = 1 << 1;

/// Options a client can send during the handshake (`NBD_OPT_*`).
pub mod opt {
    /// Chooses an export and ends the handshake; cannot report an error.
    pub const EXPORT_NAME: u32 = 1;
    /// Ends the session.
    pub const ABORT: u32 = 2;
    /// Asks for the names of all exports.
    pub const LIST: u32 = 3;
    /// Asks for TLS.
    pub const STARTTLS: u32 = 5;
    /// Asks about an export.
    pub const INFO: u32 = 6;
    /// Asks about an export, and on success ends the handshake.
    pub const GO: u32 = 7;
    /// Asks for structured replies.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// Asks for the metadata contexts of an export.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Chooses metadata contexts.
    pub const SET_META_CONTEXT: u32 = 10;
    /// Asks for 64-bit lengths in requests and replies.
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Types of replies to options (`NBD_REP_*`). Errors have the top bit set.
pub mod rep {
    /// Done; no more replies to this option.
    pub const ACK: u32 = 1;
    /// One export of a list.
    pub const SERVER: u32 = 2;
    /// One piece of information about an export.
    pub const INFO: u32 = 3;
    /// One metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// The bit that marks an error.
    pub const ERROR_BIT: u32 = 1 << 31;
    /// The option is unknown here.
    pub const ERR_UNSUP: u32 = ERROR_BIT + 1;
    /// The option is known and forbidden here.
    pub const ERR_POLICY: u32 = ERROR_BIT + 2;
    /// The option's data is malformed.
    pub const ERR_INVALID: u32 = ERROR_BIT + 3;
    /// The option is not possible on this platform.
    pub const ERR_PLATFORM: u32 = ERROR_BIT + 4;
    /// The server insists on TLS.
    pub const ERR_TLS_REQD: u32 = ERROR_BIT + 5;
    /// There is no such export.
    pub const ERR_UNKNOWN: u32 = ERROR_BIT + 6;
    /// The server is going away.
    pub const ERR_SHUTDOWN: u32 = ERROR_BIT + 7;
    /// The client must ask for the block sizes first.
    pub const ERR_BLOCK_SIZE_REQD: u32 = ERROR_BIT + 8;
    /// The request or its reply is too large.
    pub const ERR_TOO_BIG: u32 = ERROR_BIT + 9;
    /// Extended headers must be negotiated first, or are and cannot be taken back.
    pub const ERR_EXT_HEADER_REQD: u32 = ERROR_BIT + 10;
}

/// Commands (`NBD_CMD_*`).
pub mod cmd {
    /// Reads.
    pub const READ: u16 = 0;
    /// Writes; the data follows the header.
    pub const WRITE: u16 = 1;
    /// Ends the session; no reply.
    pub const DISC: u16 = 2;
    /// Makes the writes replied to so far durable.
    pub const FLUSH: u16 = 3;
    /// Says that a range is no longer needed.
    pub const TRIM: u16 = 4;
    /// Says that a range will be read soon.
    pub const CACHE: u16 = 5;
    /// Writes zeroes without sending them.
    pub const WRITE_ZEROES: u16 = 6;
    /// Asks which parts are allocated.
    pub const BLOCK_STATUS: u16 = 7;
}

/// Types of structured reply chunks (`NBD_REPLY_TYPE_*`).
pub mod chunk {
    /// Flag: the last chunk of this reply.
    pub const FLAG_DONE: u16 = 1 << 0;
    /// Nothing more to say.
    pub const NONE: u16 = 0;
    /// Data at an offset.
    pub const OFFSET_DATA: u16 = 1;
    /// Zeroes at an offset.
    pub const OFFSET_HOLE: u16 = 2;
    /// Extents and their states.
    pub const BLOCK_STATUS: u16 = 5;
    /// Extents and their states in 64 bits each.
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// The bit that marks an error.
    pub const ERROR_BIT: u16 = 1 << 15;
    /// The request failed.
    pub const ERROR: u16 = ERROR_BIT + 1;
    /// The request failed at an offset.
    pub const ERROR_OFFSET: u16 = ERROR_BIT + 2;
}

/// The metadata context that says which parts are holes.
pub const BASE_ALLOCATION: &str = "base:allocation";

/// States of an extent in [`BASE_ALLOCATION`] (`NBD_STATE_*`).
pub mod state {
    /// The extent has no storage.
    pub const HOLE: u64 = 1 << 0;
    /// The extent reads as zeros.
    pub const ZERO: u64 = 1 << 1;
}

/// Kinds of information a client can ask for in INFO and GO (`NBD_INFO_*`).
///
/// # Examples
///
/// ```
/// assert_eq!(nbd_protocol::InfoType::BlockSize as u16, 3); // as on the wire
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum InfoType {
    /// Size and transmission flags.
    Export = 0,
    /// The canonical name.
    Name = 1,
    /// A description for people.
    Description = 2,
    /// Minimum, preferred and maximum block size.
    BlockSize = 3,
}

/// A set of 16-bit flags: a newtype with the operators and the `Debug` of a set.
macro_rules! flags16 {
    ($(#[$meta:meta])* $name:ident { $($(#[$fmeta:meta])* $flag:ident = $bit:expr;)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
        pub struct $name(pub u16);

        impl $name {
            $($(#[$fmeta])* pub const $flag: Self = Self(1 << $bit);)*
            /// No flag.
            pub const NONE: Self = Self(0);

            /// Whether every flag of `other` is set.
            #[must_use]
            pub const fn contains(self, other: Self) -> bool {
                self.0 & other.0 == other.0
            }

            /// Whether no flag is set.
            #[must_use]
            pub const fn is_empty(self) -> bool {
                self.0 == 0
            }
        }

        impl BitOr for $name {
            type Output = Self;
            fn bitor(self, other: Self) -> Self {
                Self(self.0 | other.0)
            }
        }

        impl BitOrAssign for $name {
            fn bitor_assign(&mut self, other: Self) {
                self.0 |= other.0;
            }
        }

        impl BitAnd for $name {
            type Output = Self;
            fn bitand(self, other: Self) -> Self {
                Self(self.0 & other.0)
            }
        }

        /// The flags of the first that are not in the second.
        impl Sub for $name {
            type Output = Self;
            fn sub(self, other: Self) -> Self {
                Self(self.0 & !other.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let mut rest = *self;
                let mut first = true;
                $(if self.contains(Self::$flag) {
                    write!(f, "{}{}", if first { "" } else { "|" }, stringify!($flag))?;
                    first = false;
                    rest = rest - Self::$flag;
                })*
                match (first, rest.0) {
                    (true, 0) => f.write_str("0"),
                    (_, 0) => Ok(()),
                    (first, bits) => write!(f, "{}{bits:#x}", if first { "" } else { "|" }),
                }
            }
        }
    };
}

flags16! {
    /// The optional commands and properties of an export (`NBD_FLAG_*`, 16 bits).
    ///
    /// # Examples
    ///
    /// ```
    /// use nbd_protocol::TransmissionFlags as Flags;
    ///
    /// let flags = Flags::SEND_FLUSH | Flags::SEND_FUA;
    /// assert!(flags.contains(Flags::SEND_FUA) && !flags.contains(Flags::SEND_TRIM));
    /// assert_eq!(flags - Flags::SEND_FUA, Flags::SEND_FLUSH);
    /// ```
    TransmissionFlags {
        /// Always set.
        HAS_FLAGS = 0;
        /// Writes are refused.
        READ_ONLY = 1;
        /// FLUSH is supported.
        SEND_FLUSH = 2;
        /// The FUA flag is supported.
        SEND_FUA = 3;
        /// Seeking is slow.
        ROTATIONAL = 4;
        /// TRIM is supported.
        SEND_TRIM = 5;
        /// WRITE_ZEROES and its NO_HOLE flag are supported.
        SEND_WRITE_ZEROES = 6;
        /// The DF flag of READ is supported. Sent only to clients with structured replies.
        SEND_DF = 7;
        /// A flush on one connection covers the writes of all.
        CAN_MULTI_CONN = 8;
        /// Experimental resizing; never set here.
        SEND_RESIZE = 9;
        /// CACHE is supported.
        SEND_CACHE = 10;
        /// The FAST_ZERO flag of WRITE_ZEROES is supported.
        SEND_FAST_ZERO = 11;
    }
}

flags16! {
    /// Flags of one request (`NBD_CMD_FLAG_*`, 16 bits).
    ///
    /// # Examples
    ///
    /// ```
    /// use nbd_protocol::CommandFlags;
    ///
    /// let flags = CommandFlags::FUA | CommandFlags(0x8000);
    /// assert_eq!(format!("{flags:?}"), "FUA|0x8000"); // also those without a name
    /// ```
    CommandFlags {
        /// Reply only once what was written is durable.
        FUA = 0;
        /// WRITE_ZEROES shall leave the range allocated.
        NO_HOLE = 1;
        /// READ shall be answered with one chunk.
        DF = 2;
        /// BLOCK_STATUS shall describe one extent.
        REQ_ONE = 3;
        /// WRITE_ZEROES shall fail if it cannot be faster than writing.
        FAST_ZERO = 4;
        /// The length is that of a payload; only with extended headers, where WRITE must have it.
        PAYLOAD_LEN = 5;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_show_names_and_the_rest_in_hex() {
        assert_eq!(format!("{:?}", CommandFlags::NONE), "0");
        assert_eq!(format!("{:?}", CommandFlags::FUA | CommandFlags::DF), "FUA|DF");
        assert_eq!(format!("{:?}", CommandFlags(0x8001)), "FUA|0x8000");
        assert_eq!(format!("{:?}", TransmissionFlags(0x8000)), "0x8000");
    }

    /// The numbers once more, as the protocol document lists them: both sides here would agree on wrong ones.
    #[test]
    fn numbers_are_those_of_the_protocol() {
        use {CommandFlags as C, TransmissionFlags as T};
        let options = [
            opt::EXPORT_NAME,
            opt::ABORT,
            opt::LIST,
            opt::STARTTLS,
            opt::INFO,
            opt::GO,
            opt::STRUCTURED_REPLY,
            opt::LIST_META_CONTEXT,
            opt::SET_META_CONTEXT,
            opt::EXTENDED_HEADERS,
        ];
        assert_eq!(options, [1, 2, 3, 5, 6, 7, 8, 9, 10, 11]);
        assert_eq!([rep::ACK, rep::SERVER, rep::INFO, rep::META_CONTEXT], [1, 2, 3, 4]);
        let errors = [
            rep::ERR_UNSUP,
            rep::ERR_POLICY,
            rep::ERR_INVALID,
            rep::ERR_PLATFORM,
            rep::ERR_TLS_REQD,
            rep::ERR_UNKNOWN,
            rep::ERR_SHUTDOWN,
            rep::ERR_BLOCK_SIZE_REQD,
            rep::ERR_TOO_BIG,
            rep::ERR_EXT_HEADER_REQD,
        ];
        assert!(errors.into_iter().eq(0x8000_0001..=0x8000_000a));
        let commands = [
            cmd::READ,
            cmd::WRITE,
            cmd::DISC,
            cmd::FLUSH,
            cmd::TRIM,
            cmd::CACHE,
            cmd::WRITE_ZEROES,
            cmd::BLOCK_STATUS,
        ];
        assert!(commands.into_iter().eq(0..=7));
        let chunks = [chunk::NONE, chunk::OFFSET_DATA, chunk::OFFSET_HOLE];
        assert_eq!(chunks, [0, 1, 2]);
        assert_eq!([chunk::BLOCK_STATUS, chunk::BLOCK_STATUS_EXT], [5, 6]);
        assert_eq!([chunk::ERROR, chunk::ERROR_OFFSET], [0x8001, 0x8002]);
        assert_eq!((state::HOLE, state::ZERO, chunk::FLAG_DONE), (1, 2, 1));
        assert_eq!(MAX_PAYLOAD, 33_554_432);
        let shown = "HAS_FLAGS|READ_ONLY|SEND_FLUSH|SEND_FUA|ROTATIONAL|SEND_TRIM|SEND_WRITE_ZEROES|SEND_DF|\
                     CAN_MULTI_CONN|SEND_RESIZE|SEND_CACHE|SEND_FAST_ZERO";
        assert_eq!(format!("{:?}", T(0xfff)), shown);
        assert_eq!((T::HAS_FLAGS.0, T::SEND_FUA.0, T::SEND_FAST_ZERO.0), (1, 8, 1 << 11));
        assert_eq!(format!("{:?}", C(0x3f)), "FUA|NO_HOLE|DF|REQ_ONE|FAST_ZERO|PAYLOAD_LEN");
        assert_eq!((C::FUA.0, C::PAYLOAD_LEN.0), (1, 32));
    }

    #[test]
    fn magics_are_the_ascii_they_claim() {
        assert_eq!(&INIT_MAGIC.to_be_bytes(), b"NBDMAGIC");
        assert_eq!(&OPTION_MAGIC.to_be_bytes(), b"IHAVEOPT");
    }
}
