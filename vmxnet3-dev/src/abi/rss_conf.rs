//! The RSS configuration (`UPT1_RSSConf`).

use pvrdma_saved_state::vmxnet3 as saved;
use thiserror::Error;

use super::le16;
use crate::saved_state::error::{RestoreError, exact, narrow, require};

/// Size in memory, in bytes.
pub(crate) const RSS_CONF_LEN: usize = 8 + KEY_LEN + MAX_TABLE;
/// Size of the key, in bytes.
pub(crate) const KEY_LEN: usize = 40;
/// Maximum number of entries of the indirection table.
const MAX_TABLE: usize = 128;
/// Bits of all known hash types.
const HASH_TYPES: u32 = 0xf;

/// Reason a configuration is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub(crate) enum RssConfError {
    /// The hash function is not Toeplitz.
    #[error("RSS hash function {0}")]
    Function(u16),
    /// The key does not have 40 bytes.
    #[error("RSS key of {0} bytes")]
    Key(u16),
    /// The table has no entries, or too many.
    #[error("RSS table of {0} entries")]
    Table(u16),
    /// An entry names a queue that does not exist.
    #[error("RSS queue {0}")]
    Queue(u8),
}

impl From<RssConfError> for RestoreError {
    fn from(error: RssConfError) -> Self {
        let (field, value) = match error {
            RssConfError::Function(function) => ("RSS hash function", function.into()),
            RssConfError::Key(len) => ("length of the RSS key", len.into()),
            RssConfError::Table(entries) => ("length of the RSS table", entries.into()),
            RssConfError::Queue(queue) => ("RSS queue", queue.into()),
        };
        Self::Invalid { field, value }
    }
}

/// RSS configuration: hash types, key, and indirection table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct RssConf {
    pub(crate) ipv4: bool,
    pub(crate) tcp_ipv4: bool,
    pub(crate) ipv6: bool,
    pub(crate) tcp_ipv6: bool,
    pub(crate) key: [u8; KEY_LEN],
    /// Indirection table: at least one entry, each the number of an existing queue.
    pub(crate) table: Vec<u8>,
}

impl RssConf {
    /// Parses a configuration for `queues` receive queues. Returns `None` if no frames are to be hashed.
    pub(crate) fn parse(bytes: &[u8; RSS_CONF_LEN], queues: u8) -> Result<Option<Self>, RssConfError> {
        let (types, function, key_len, entries) = (le16(bytes, 0), le16(bytes, 2), le16(bytes, 4), le16(bytes, 6));
        match function {
            0 => return Ok(None),
            1 => {}
            other => return Err(RssConfError::Function(other)),
        }
        if usize::from(key_len) != KEY_LEN {
            return Err(RssConfError::Key(key_len));
        }
        let table = bytes.get(8 + KEY_LEN..).and_then(|rest| rest.get(..entries.into())).unwrap_or_default();
        if table.is_empty() {
            return Err(RssConfError::Table(entries));
        }
        let key = bytes.get(8..).and_then(<[u8]>::first_chunk).copied().unwrap_or([0; KEY_LEN]);
        Self::new(types, key, table.to_vec(), queues).map(Some)
    }

    /// Creates a configuration for `queues` receive queues. The table has at least one entry.
    fn new(types: u16, key: [u8; KEY_LEN], table: Vec<u8>, queues: u8) -> Result<Self, RssConfError> {
        if let Some(&queue) = table.iter().find(|&&queue| queue >= queues) {
            return Err(RssConfError::Queue(queue));
        }
        Ok(Self {
            ipv4: types & 1 != 0,
            tcp_ipv4: types & 1 << 1 != 0,
            ipv6: types & 1 << 2 != 0,
            tcp_ipv6: types & 1 << 3 != 0,
            key,
            table,
        })
    }

    /// Returns the saved form.
    pub(crate) fn save(&self) -> saved::Rss {
        let Self { ipv4, tcp_ipv4, ipv6, tcp_ipv6, key, table } = self;
        let hash_types =
            u32::from(*ipv4) | u32::from(*tcp_ipv4) << 1 | u32::from(*ipv6) << 2 | u32::from(*tcp_ipv6) << 3;
        saved::Rss { hash_types, key: key.to_vec(), table: table.clone() }
    }

    /// Restores a configuration for `queues` receive queues.
    ///
    /// # Errors
    /// A hash type is unknown, the key or the table has a wrong length, or the table names a queue that does not exist.
    pub(crate) fn restore(rss: saved::Rss, queues: u8) -> Result<Self, RestoreError> {
        let saved::Rss { hash_types, key, table } = rss;
        require("RSS hash types", hash_types, hash_types <= HASH_TYPES)?;
        require("length of the RSS table", table.len() as u64, (1..=MAX_TABLE).contains(&table.len()))?;
        let key = exact("RSS key", &key)?;
        Ok(Self::new(narrow("RSS hash types", hash_types)?, key, table, queues)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conf(function: u16, key: u16, entries: u16, queue: u8) -> [u8; RSS_CONF_LEN] {
        let mut bytes = [queue; RSS_CONF_LEN];
        for (at, value) in [(0, 0xf), (2, function), (4, key), (6, entries)] {
            bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
        }
        bytes
    }

    #[test]
    fn numbers_are_bounded() {
        assert_eq!(RssConf::parse(&conf(0, 0, 0, 0), 1), Ok(None));
        assert_eq!(RssConf::parse(&conf(1, 40, 32, 3), 4).unwrap().unwrap().table, [3; 32]);
        assert_eq!(RssConf::parse(&conf(1, 40, 32, 4), 4), Err(RssConfError::Queue(4)));
        assert_eq!(RssConf::parse(&conf(2, 40, 32, 0), 4), Err(RssConfError::Function(2)));
        assert_eq!(RssConf::parse(&conf(1, 41, 32, 0), 4), Err(RssConfError::Key(41)));
        for entries in [0, 129, u16::MAX] {
            assert_eq!(RssConf::parse(&conf(1, 40, entries, 0), 4), Err(RssConfError::Table(entries)));
        }
    }
}
