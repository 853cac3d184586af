//! Structures in guest memory as plain values: fields at fixed offsets, little-endian, copied in and out.
//!
//! A structure that is read is a copy and cannot change afterwards. Bytes that no field covers are ignored. Each field
//! is declared with its offset, and a test compares names, offsets and sizes with `docs/layout.json`.

/// A value with a fixed representation in guest memory.
pub(crate) trait GuestLayout: Sized {
    /// Size in bytes.
    const SIZE: usize;

    /// Decodes the first [`Self::SIZE`] bytes. Missing bytes count as zero.
    fn decode(bytes: &[u8]) -> Self;

    /// Encodes into the first [`Self::SIZE`] bytes. Bytes that no field covers keep their value; fields that do not fit
    /// are omitted.
    fn encode(&self, bytes: &mut [u8]);

    /// Names, offsets and sizes of the fields, for the comparison with the table of the interface.
    #[cfg(test)]
    fn leaves(name: &str, offset: usize, out: &mut Vec<(String, usize, usize)>) {
        out.push((name.to_owned(), offset, Self::SIZE));
    }
}

macro_rules! guest_integers {
    ($($ty:ty),*) => {$(
        impl GuestLayout for $ty {
            const SIZE: usize = size_of::<Self>();

            #[inline]
            fn decode(bytes: &[u8]) -> Self {
                bytes.first_chunk().map_or(0, |chunk| Self::from_le_bytes(*chunk))
            }

            #[inline]
            fn encode(&self, bytes: &mut [u8]) {
                if let Some(chunk) = bytes.first_chunk_mut() {
                    *chunk = self.to_le_bytes();
                }
            }
        }
    )*};
}

guest_integers!(u8, u16, u32, u64);

impl<const N: usize> GuestLayout for [u8; N] {
    const SIZE: usize = N;

    #[inline]
    fn decode(bytes: &[u8]) -> Self {
        bytes.first_chunk().copied().unwrap_or([0; N])
    }

    #[inline]
    fn encode(&self, bytes: &mut [u8]) {
        if let Some(chunk) = bytes.first_chunk_mut() {
            *chunk = *self;
        }
    }
}

/// Decodes the field at `offset`.
#[inline]
pub(crate) fn read_field<T: GuestLayout>(bytes: &[u8], offset: usize) -> T {
    T::decode(bytes.get(offset..).unwrap_or_default())
}

/// Encodes the field at `offset`.
#[inline]
pub(crate) fn write_field<T: GuestLayout>(bytes: &mut [u8], offset: usize, value: &T) {
    value.encode(bytes.get_mut(offset..).unwrap_or_default());
}

/// Declares a structure: its name, its name and size in the interface, and its fields with their offsets. A name with
/// dots is that of a member of a union inside a structure; offsets and size are then those of the whole structure.
macro_rules! guest_struct {
    ($(#[$meta:meta])* $name:ident, $c_name:literal, $size:literal {
        $($(#[$field_meta:meta])* $at:literal $field:ident: $ty:ty,)*
    }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        pub(crate) struct $name {
            $($(#[$field_meta])* pub(crate) $field: $ty,)*
        }

        impl $crate::abi::layout::GuestLayout for $name {
            const SIZE: usize = $size;

            #[inline]
            fn decode(bytes: &[u8]) -> Self {
                Self { $($field: $crate::abi::layout::read_field(bytes, $at),)* }
            }

            #[inline]
            fn encode(&self, bytes: &mut [u8]) {
                $($crate::abi::layout::write_field(bytes, $at, &self.$field);)*
            }

            #[cfg(test)]
            fn leaves(name: &str, offset: usize, out: &mut Vec<(String, usize, usize)>) {
                $(<$ty as $crate::abi::layout::GuestLayout>::leaves(
                    &format!("{name}.{}", stringify!($field)), offset + $at, out);)*
            }
        }

        #[cfg(test)]
        impl $crate::abi::layout::tests::Named for $name {
            const C_NAME: &'static str = $c_name;
        }
    };
}

pub(crate) use guest_struct;

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::HashMap;

    use serde_json::Value;

    use super::*;
    use crate::abi::{cmd, dsr, wqe};

    /// Structure that has a name in the interface's table.
    pub(crate) trait Named: GuestLayout {
        /// Name in that table.
        const C_NAME: &'static str;
    }

    struct Table {
        sizes: HashMap<String, u64>,
        fields: HashMap<String, (u64, u64)>,
    }

    fn table() -> Table {
        let json: Value = serde_json::from_str(include_str!("../../docs/layout.json")).unwrap();
        let mut table = Table { sizes: HashMap::new(), fields: HashMap::new() };
        for (name, structure) in json["structs"].as_object().unwrap() {
            let name = name.strip_prefix("pvrdma_").unwrap();
            table.sizes.insert(name.to_owned(), structure["size"].as_u64().unwrap());
            for (field, place) in structure["leaves"].as_object().unwrap() {
                let place = (place[0].as_u64().unwrap(), place[1].as_u64().unwrap());
                table.fields.insert(format!("{name}.{field}"), place);
            }
        }
        table
    }

    fn check<T: Named>(table: &Table) {
        let structure = T::C_NAME.split('.').next().unwrap();
        assert_eq!(table.sizes.get(structure), Some(&(T::SIZE as u64)), "size of {}", T::C_NAME);
        let mut leaves = Vec::new();
        T::leaves(T::C_NAME, 0, &mut leaves);
        for (name, offset, size) in leaves {
            assert_eq!(table.fields.get(&name), Some(&(offset as u64, size as u64)), "{name}");
        }
        // Encoding and decoding again yields the same value for all bytes.
        let bytes: Vec<u8> = (0..T::SIZE).map(|i| u8::try_from(i % 251).unwrap().wrapping_add(3)).collect();
        let mut again = vec![0; T::SIZE];
        T::decode(&bytes).encode(&mut again);
        let mut twice = vec![0; T::SIZE];
        T::decode(&again).encode(&mut twice);
        assert_eq!(again, twice, "{}", T::C_NAME);
    }

    macro_rules! requests {
        ($($id:literal $name:ident($request:ident) -> $reply:ident: $module:ident::$handler:ident;)*) => {
            fn check_requests(table: &Table) {
                $(check::<cmd::$request>(table);)*
            }
        };
    }

    cmd::with_commands!(requests);

    /// Conformance 16.
    #[test]
    fn layouts_are_those_of_the_interface() {
        let table = table();
        check::<dsr::RingPages>(&table);
        check::<dsr::Caps>(&table);
        check::<dsr::SharedRegion>(&table);
        check_requests(&table);
        check::<cmd::RequestHeader>(&table);
        check::<cmd::ResponseHeader>(&table);
        check::<cmd::PortAttr>(&table);
        check::<cmd::QpCap>(&table);
        check::<cmd::AhAttr>(&table);
        check::<cmd::QpAttr>(&table);
        check::<cmd::SrqAttr>(&table);
        check::<cmd::QueryPortResp>(&table);
        check::<cmd::QueryPkeyResp>(&table);
        check::<cmd::CreateUcResp>(&table);
        check::<cmd::CreatePdResp>(&table);
        check::<cmd::CreateMrResp>(&table);
        check::<cmd::CreateCqResp>(&table);
        check::<cmd::CreateQpResp>(&table);
        check::<cmd::CreateQpRespV2>(&table);
        check::<cmd::QueryQpResp>(&table);
        check::<cmd::CreateSrqResp>(&table);
        check::<cmd::QuerySrqResp>(&table);
        check::<wqe::SgeEntry>(&table);
        check::<wqe::RecvHeader>(&table);
        check::<wqe::SendHeader>(&table);
        check::<wqe::ImmediateOrKey>(&table);
        check::<wqe::Rdma>(&table);
        check::<wqe::Atomic>(&table);
        check::<wqe::FastRegister>(&table);
        check::<wqe::AddressVector>(&table);
        check::<wqe::Datagram>(&table);
        check::<wqe::Cqe>(&table);
    }

    #[test]
    fn short_input_reads_as_zero_and_short_output_is_cut() {
        let pages = dsr::RingPages::decode(&[4, 0, 0, 0, 0, 0, 0, 0, 1]);
        assert_eq!(pages, dsr::RingPages { num_pages: 4, pdir_dma: 0 });
        let mut out = [0xff; 6];
        pages.encode(&mut out);
        assert_eq!(out, [4, 0, 0, 0, 0xff, 0xff]);
    }
}
