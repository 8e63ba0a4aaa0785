//! A kernel's arguments as one block of bytes, laid out when a launch is prepared and copied at each launch.

use crate::{launch::LaunchError, tensor_map::TensorMap, workspace::MAX_WORKSPACES};
use flashcore_ptx::launch::{LaunchSpec, Param, Slot, TensorMapSpec};
use std::mem::MaybeUninit;

/// Parameter space that every supported device has.
pub(crate) const MAX_BYTES: usize = 4096;
/// Most parameters of a kernel.
pub(crate) const MAX_PARAMS: usize = 128;

/// Where an address that changes from launch to launch comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Buffer(u8),
    Workspace(u8),
}

/// A place in the block that is written at each launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Patch {
    pub(crate) offset: u16,
    pub(crate) source: Source,
}

/// A tensor map in the block, whose address is written at each launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MapPatch {
    pub(crate) map: Patch,
    /// Where in the block the address lies, if the map holds it as it is.
    pub(crate) address: Option<u16>,
}

/// A tensor map's bytes, and which of its 64-bit words is the address, if one is.
pub(crate) struct EncodedMap {
    pub(crate) bytes: [u8; TensorMap::BYTES],
    pub(crate) address_word: Option<usize>,
}

/// The block with its constants filled in, and where to write the rest.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    pub(crate) bytes: Vec<u8>,
    /// Start and size of each parameter.
    pub(crate) params: Vec<(u16, u16)>,
    pub(crate) addresses: Vec<Patch>,
    pub(crate) maps: Vec<MapPatch>,
    /// How many buffers the caller must pass.
    pub(crate) buffers: usize,
}

impl Layout {
    /// Lays out `spec`'s parameters; `encode` makes tensor maps.
    pub(crate) fn new<E: From<LaunchError>>(
        spec: &LaunchSpec,
        mut encode: impl FnMut(&TensorMapSpec) -> Result<EncodedMap, E>,
    ) -> Result<Self, E> {
        check_counts(spec)?;
        let mut out = Self { bytes: vec![], params: vec![], addresses: vec![], maps: vec![], buffers: 0 };
        for param in &spec.params {
            match param {
                Param::U32(value) => out.push(4, &value.to_ne_bytes())?,
                Param::U64(value) => out.push(8, &value.to_ne_bytes())?,
                Param::F32(value) => out.push(4, &value.to_ne_bytes())?,
                Param::Buffer(slot) => {
                    let offset = out.push(8, &[0; 8])?;
                    let source = out.source(spec, *slot);
                    out.addresses.push(Patch { offset, source });
                    continue;
                }
                Param::TensorMap(map) => {
                    let encoded = encode(map)?;
                    let offset = out.push(TensorMap::BYTES, &encoded.bytes)?;
                    let source = out.source(spec, map.slot);
                    let address = encoded.address_word.map(|word| offset + 8 * word as u16);
                    out.maps.push(MapPatch { map: Patch { offset, source }, address });
                    continue;
                }
                other => return Err(LaunchError::UnknownParam { param: format!("{other:?}") }.into()),
            };
        }
        Ok(out)
    }

    /// Appends a parameter at the next multiple of `align`; returns its offset.
    fn push(&mut self, align: usize, value: &[u8]) -> Result<u16, LaunchError> {
        let offset = self.bytes.len().next_multiple_of(align);
        let bytes = offset + value.len();
        if bytes > MAX_BYTES {
            return Err(LaunchError::ParamsTooLarge { bytes, limit: MAX_BYTES });
        }
        self.bytes.resize(offset, 0);
        self.bytes.extend_from_slice(value);
        self.params.push((offset as u16, value.len() as u16));
        Ok(offset as u16)
    }

    fn source(&mut self, spec: &LaunchSpec, slot: Slot) -> Source {
        match spec.workspace.iter().position(|workspace| workspace.slot == slot) {
            Some(at) => Source::Workspace(at as u8),
            None => {
                self.buffers = self.buffers.max(slot.0 as usize + 1);
                Source::Buffer(slot.0)
            }
        }
    }

    /// Compares with the sizes that the kernel declares.
    pub(crate) fn check_sizes(&self, kernel: Vec<usize>) -> Result<(), LaunchError> {
        let spec: Vec<usize> = self.params.iter().map(|&(_, bytes)| bytes as usize).collect();
        if spec == kernel { Ok(()) } else { Err(LaunchError::ParamMismatch { kernel, spec }) }
    }
}

fn check_counts(spec: &LaunchSpec) -> Result<(), LaunchError> {
    let (params, workspaces) = (spec.params.len(), spec.workspace.len());
    if params > MAX_PARAMS {
        return Err(LaunchError::TooManyParams { params, limit: MAX_PARAMS });
    }
    if workspaces > MAX_WORKSPACES {
        return Err(LaunchError::TooManyWorkspaces { workspaces, limit: MAX_WORKSPACES });
    }
    Ok(())
}

/// A launch's own copy of the block, on the stack and aligned for tensor maps.
#[repr(C, align(128))]
pub(crate) struct Block([MaybeUninit<u8>; MAX_BYTES]);

impl Block {
    /// Copies `template`, which is at most [`MAX_BYTES`] long.
    pub(crate) fn copy_of(template: &[u8]) -> Self {
        let mut block = Self([MaybeUninit::uninit(); MAX_BYTES]);
        block.write(0, template);
        block
    }

    /// Writes an address at `offset`.
    pub(crate) fn set(&mut self, offset: u16, address: u64) {
        self.write(offset as usize, &address.to_ne_bytes());
    }

    fn write(&mut self, offset: usize, bytes: &[u8]) {
        let place = &mut self.0[offset..][..bytes.len()];
        // SAFETY: `place` is as long as `bytes`, and a `MaybeUninit<u8>` takes any byte.
        unsafe { bytes.as_ptr().copy_to_nonoverlapping(place.as_mut_ptr().cast(), bytes.len()) };
    }

    /// The start of the block, from which the driver reads (and in which it rewrites tensor maps).
    pub(crate) fn start(&mut self) -> *mut u8 {
        self.0.as_mut_ptr().cast()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_ptx::{
        ident::Ident,
        launch::{TensorElement, Workspace},
        layout::Swizzle,
    };

    fn spec(params: Vec<Param>, workspace: Vec<Workspace>) -> LaunchSpec {
        LaunchSpec {
            entry: Ident::new("k").unwrap(),
            grid: [1; 3],
            block: [32, 1, 1],
            cluster: [1; 3],
            shared_bytes: 0,
            dependent: false,
            params,
            workspace,
        }
    }

    fn map(slot: u8) -> Param {
        Param::TensorMap(TensorMapSpec {
            slot: Slot(slot),
            element: TensorElement::F16,
            dims: vec![64],
            strides: vec![],
            box_dims: vec![64],
            swizzle: Swizzle::None,
        })
    }

    fn layout(spec: &LaunchSpec) -> Result<Layout, LaunchError> {
        Layout::new(spec, |map| Ok(EncodedMap { bytes: [map.slot.0; 128], address_word: Some(2) }))
    }

    #[test]
    fn parameters_lie_at_their_natural_alignment() {
        let workspace = Workspace { slot: Slot(7), bytes: 64, zeroed: true };
        let params = vec![
            Param::U32(0x0102_0304),
            Param::Buffer(Slot(2)),
            Param::F32(1.5),
            Param::U64(u64::MAX),
            map(3),
            Param::U32(9),
            Param::Buffer(Slot(7)),
        ];
        let layout = layout(&spec(params, vec![workspace])).unwrap();
        assert_eq!(layout.params, [(0, 4), (8, 8), (16, 4), (24, 8), (128, 128), (256, 4), (264, 8)]);
        assert_eq!(layout.bytes[0..4], 0x0102_0304u32.to_ne_bytes());
        assert_eq!(layout.bytes[16..20], 1.5f32.to_ne_bytes());
        assert_eq!(layout.bytes[24..32], [0xff; 8]);
        assert_eq!(layout.bytes[128..256], [3; 128]);
        let patch = |offset, source| Patch { offset, source };
        assert_eq!(layout.addresses, [patch(8, Source::Buffer(2)), patch(264, Source::Workspace(0))]);
        let map = patch(128, Source::Buffer(3));
        assert_eq!(layout.maps, [MapPatch { map, address: Some(128 + 16) }]);
        assert_eq!(layout.buffers, 4, "workspaces are not the caller's to pass");
    }

    #[test]
    fn a_kernel_with_other_parameters_is_refused() {
        let layout = layout(&spec(vec![Param::U32(1), Param::Buffer(Slot(0))], vec![])).unwrap();
        assert_eq!(layout.check_sizes(vec![4, 8]), Ok(()));
        let mismatch = LaunchError::ParamMismatch { kernel: vec![8, 8], spec: vec![4, 8] };
        assert_eq!(layout.check_sizes(vec![8, 8]), Err(mismatch));
        assert!(layout.check_sizes(vec![4]).is_err());
    }

    #[test]
    fn too_much_is_an_error() {
        let too_large = layout(&spec((0..33).map(map).collect(), vec![]));
        assert_eq!(too_large.unwrap_err(), LaunchError::ParamsTooLarge { bytes: 33 * 128, limit: 4096 });
        let too_many = layout(&spec(vec![Param::U32(0); 129], vec![]));
        assert_eq!(too_many.unwrap_err(), LaunchError::TooManyParams { params: 129, limit: 128 });
        let workspaces = vec![Workspace { slot: Slot(0), bytes: 1, zeroed: false }; 9];
        let too_many = layout(&spec(vec![], workspaces));
        assert_eq!(too_many.unwrap_err(), LaunchError::TooManyWorkspaces { workspaces: 9, limit: 8 });
    }

    #[test]
    fn a_block_is_a_private_copy() {
        let template = [7u8; 200];
        let mut block = Block::copy_of(&template);
        block.set(8, 0x1122_3344_5566_7788);
        assert_eq!(block.start() as usize % 128, 0);
        // SAFETY: the first 200 bytes are initialised.
        let bytes = unsafe { std::slice::from_raw_parts(block.start(), 200) };
        assert_eq!(bytes[8..16], 0x1122_3344_5566_7788u64.to_ne_bytes());
        assert!(bytes[..8].iter().chain(&bytes[16..]).all(|&byte| byte == 7));
        assert_eq!(template, [7; 200]);
    }
}
