//! The protocol: lines of UTF-8 text in both directions.
//!
//! | client | server answers |
//! |---|---|
//! | `SUB topic` | `OK SUB topic` |
//! | `UNSUB topic` | `OK UNSUB topic`; at most a message that is being published follows |
//! | `PUB priority topic text` | `OK PUB queued dropped`: for how many subscribers; priorities are 0 to 9 |
//! | `PING` | `PONG` |
//! | `QUIT` | the messages that are queued, then `BYE` |
//! | anything else | `ERR reason` |
//!
//! Answers come in the order of the commands. Without a command the server sends:
//!
//! | line | meaning |
//! |---|---|
//! | `HELLO id` | the first line: the public id of this client |
//! | `MSG topic priority id text` | a message, and the id of its publisher |
//! | `DROPPED count` | messages that this client lost since the last such line, because it read too slowly |
//! | `END topic` | the server ends: the topic accepts no more messages; those that are queued follow |
//! | `BYE` | the last line of a connection |

use std::fmt;
use std::sync::Arc;

use radix_ctx::Id;
use thiserror::Error;

/// The highest priority of a message.
pub(crate) const MAX_PRIORITY: u32 = 9;

/// The longest topic in bytes.
const MAX_TOPIC: usize = 64;

/// A command that has an answer: all but `QUIT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Command<'a> {
    Subscribe { topic: &'a str },
    Unsubscribe { topic: &'a str },
    Publish { priority: u32, topic: &'a str, text: &'a str },
    Ping,
}

/// The reason why a line is no command. The text follows `ERR`.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub(crate) enum ParseError {
    #[error("unknown command")]
    Unknown,
    #[error("expected: {0}")]
    Usage(&'static str),
    #[error("the priority is not a number from 0 to {MAX_PRIORITY}")]
    Priority,
    #[error("the topic is longer than {MAX_TOPIC} bytes")]
    Topic,
}

impl<'a> Command<'a> {
    /// Parses a line without its line end.
    pub(crate) fn parse(line: &'a str) -> Result<Command<'a>, ParseError> {
        let (name, rest) = line.split_once(' ').unwrap_or((line, ""));
        match name {
            "SUB" => Ok(Command::Subscribe { topic: topic(rest, "SUB topic")? }),
            "UNSUB" => Ok(Command::Unsubscribe { topic: topic(rest, "UNSUB topic")? }),
            "PUB" => publish(rest),
            "PING" if rest.is_empty() => Ok(Command::Ping),
            _ => Err(ParseError::Unknown),
        }
    }
}

fn publish(rest: &str) -> Result<Command<'_>, ParseError> {
    const USAGE: &str = "PUB priority topic text";
    let (priority, rest) = rest.split_once(' ').ok_or(ParseError::Usage(USAGE))?;
    let (name, text) = rest.split_once(' ').ok_or(ParseError::Usage(USAGE))?;
    let priority = priority.parse().map_err(|_| ParseError::Priority)?;
    if priority > MAX_PRIORITY {
        return Err(ParseError::Priority);
    }
    Ok(Command::Publish { priority, topic: topic(name, USAGE)?, text })
}

fn topic<'a>(word: &'a str, usage: &'static str) -> Result<&'a str, ParseError> {
    if word.is_empty() || word.contains(char::is_whitespace) {
        return Err(ParseError::Usage(usage));
    }
    if word.len() > MAX_TOPIC { Err(ParseError::Topic) } else { Ok(word) }
}

/// A published message. The queues of all its subscribers share one.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) topic: String,
    pub(crate) priority: u32,
    pub(crate) from: Id,
    pub(crate) text: String,
}

/// A line for a client, without its line end.
#[derive(Clone, Debug)]
pub(crate) enum Outbound {
    Hello(Id),
    /// The answer to a command.
    Answer(String),
    Error(String),
    Message(Arc<Message>),
    Dropped(u64),
    End(Arc<str>),
    Bye,
}

impl fmt::Display for Outbound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outbound::Hello(id) => write!(f, "HELLO {id}"),
            Outbound::Answer(text) => f.write_str(text),
            Outbound::Error(reason) => write!(f, "ERR {reason}"),
            Outbound::Message(message) => {
                let Message { topic, priority, from, text } = &**message;
                write!(f, "MSG {topic} {priority} {from} {text}")
            }
            Outbound::Dropped(count) => write!(f, "DROPPED {count}"),
            Outbound::End(topic) => write!(f, "END {topic}"),
            Outbound::Bye => f.write_str("BYE"),
        }
    }
}
