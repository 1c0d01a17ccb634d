// SPDX-License-Identifier: GPL-2.0-only
/*
 * DMA operations of endpoints
 *
 * At map the buffer is copied to the slot whatever the direction, so that bytes which the device
 * does not write come back as they were. At unmap, and when the CPU is given the buffer, the slot
 * is copied back if the device may write it.
 */

#include <linux/dma-mapping.h>
#include <linux/gfp.h>
#include <linux/log2.h>
#include <linux/mm.h>

#include "virtio-iommu-bounce.h"

static bool may_bounce(struct vib_endpoint *endpoint, size_t size, unsigned long attrs)
{
	return size && size <= endpoint->threshold && !(attrs & DMA_ATTR_SKIP_CPU_SYNC);
}

/* Memory of the kernel's own map, which a copy can reach */
static bool can_copy(struct page *page)
{
	return pfn_valid(page_to_pfn(page)) && !is_zone_device_page(page);
}

static dma_addr_t start_of(struct vib_slot *slot)
{
	return slot->iova + slot->skip;
}

/* A slot that the device can address, with room for the data as far into a page as in the buffer */
static struct vib_slot *take_slot(struct vib_endpoint *endpoint, size_t skip, size_t size)
{
	struct device *dev = &endpoint->pci->dev;
	u64 limit = min_not_zero(dma_get_mask(dev), dev->bus_dma_limit);
	struct vib_slot *slot = vib_slot_take(endpoint, skip, size);

	if (slot && start_of(slot) + size - 1 > limit) {
		vib_slot_give(endpoint, slot);
		slot = NULL;
	}
	if (!slot)
		atomic64_inc(&endpoint->no_slot);
	return slot;
}

static dma_addr_t map_page(struct device *dev, struct page *page, unsigned long offset, size_t size,
			   enum dma_data_direction dir, unsigned long attrs)
{
	struct vib_endpoint *endpoint = vib_endpoint(dev);
	phys_addr_t phys = page_to_phys(page) + offset;
	struct vib_slot *slot = NULL;

	if (may_bounce(endpoint, size, attrs) && can_copy(page))
		slot = take_slot(endpoint, offset_in_page(phys), size);
	if (slot) {
		slot->orig = phys_to_virt(phys);
		vib_copy(slot, 0, size, true);
		atomic64_inc(&endpoint->bounced);
		return start_of(slot);
	}
	atomic64_inc(&endpoint->mapped);
	return size ? vib_map(endpoint, phys, size, dir) : DMA_MAPPING_ERROR;
}

/* Ends a bounced DMA. */
static void end(struct vib_endpoint *endpoint, struct vib_slot *slot, enum dma_data_direction dir,
		unsigned long attrs)
{
	if (vib_writes(dir) && !(attrs & DMA_ATTR_SKIP_CPU_SYNC))
		vib_copy(slot, 0, slot->size, false);
	vib_slot_give(endpoint, slot);
}

static void unmap_page(struct device *dev, dma_addr_t addr, size_t size,
		       enum dma_data_direction dir, unsigned long attrs)
{
	struct vib_endpoint *endpoint = vib_endpoint(dev);
	struct vib_slot *slot;

	if (!vib_is_window(endpoint, addr)) {
		vib_unmap(endpoint, addr, size);
		return;
	}
	slot = vib_slot_find(endpoint, addr);
	if (slot)
		end(endpoint, slot, dir, attrs);
}

/*
 * Bytes of a list that may bounce, all of them within reach of a copy, as one segment that the
 * device can take; 0 if it may not. Slots are aligned to their size: none crosses a boundary that
 * is larger.
 */
static size_t list_size(struct vib_endpoint *endpoint, struct scatterlist *sgl, int nents)
{
	struct device *dev = &endpoint->pci->dev;
	struct scatterlist *sg;
	size_t size = 0;
	int i;

	for_each_sg(sgl, sg, nents, i) {
		size += sg->length;
		if (!can_copy(sg_page(sg)) || size > endpoint->threshold)
			return 0;
	}
	if (!size || size > dma_get_max_seg_size(dev) ||
	    roundup_pow_of_two(offset_in_page(sg_phys(sgl)) + size) - 1 > dma_get_seg_boundary(dev))
		return 0;
	return size;
}

static int map_sg(struct device *dev, struct scatterlist *sgl, int nents,
		  enum dma_data_direction dir, unsigned long attrs)
{
	struct vib_endpoint *endpoint = vib_endpoint(dev);
	size_t size = list_size(endpoint, sgl, nents);
	struct vib_slot *slot = NULL;
	struct scatterlist *sg;
	int i;

	if (may_bounce(endpoint, size, attrs))
		slot = take_slot(endpoint, offset_in_page(sg_phys(sgl)), size);
	if (!slot) {
		atomic64_inc(&endpoint->mapped);
		return vib_map_list(endpoint, sgl, nents, dir);
	}
	if (nents == 1) {
		slot->orig = sg_virt(sgl);
	} else {
		slot->sgl = sgl;
		slot->nents = nents;
	}
	vib_copy(slot, 0, size, true);
	for_each_sg(sgl, sg, nents, i) {
		sg_dma_address(sg) = i ? DMA_MAPPING_ERROR : start_of(slot);
		sg_dma_len(sg) = i ? 0 : size;
	}
	atomic64_inc(&endpoint->bounced);
	return 1;
}

/* The slot of a list, which may be a copy of the one that was mapped. */
static struct vib_slot *slot_of_list(struct vib_endpoint *endpoint, struct scatterlist *sgl)
{
	struct vib_slot *slot = vib_slot_find(endpoint, sg_dma_address(sgl));

	if (slot && slot->sgl)
		slot->sgl = sgl;
	return slot;
}

static void unmap_sg(struct device *dev, struct scatterlist *sgl, int nents,
		     enum dma_data_direction dir, unsigned long attrs)
{
	struct vib_endpoint *endpoint = vib_endpoint(dev);
	struct vib_slot *slot;

	if (!vib_is_window(endpoint, sg_dma_address(sgl))) {
		vib_unmap_list(endpoint, sgl, nents);
		return;
	}
	slot = slot_of_list(endpoint, sgl);
	if (slot)
		end(endpoint, slot, dir, attrs);
}

/* Part of a buffer is given to the device, or to the CPU. The direction of the call counts. */
static void sync(struct device *dev, dma_addr_t addr, size_t size, bool copies, bool to_device)
{
	struct vib_endpoint *endpoint = vib_endpoint(dev);
	struct vib_slot *slot;

	if (!copies || !vib_is_window(endpoint, addr))
		return;
	slot = vib_slot_find(endpoint, addr);
	if (slot)
		vib_copy(slot, addr - start_of(slot), size, to_device);
}

static void sync_single_for_cpu(struct device *dev, dma_addr_t addr, size_t size,
				enum dma_data_direction dir)
{
	sync(dev, addr, size, vib_writes(dir), false);
}

static void sync_single_for_device(struct device *dev, dma_addr_t addr, size_t size,
				   enum dma_data_direction dir)
{
	sync(dev, addr, size, vib_reads(dir), true);
}

static void sync_list(struct device *dev, struct scatterlist *sgl, bool copies, bool to_device)
{
	struct vib_endpoint *endpoint = vib_endpoint(dev);
	struct vib_slot *slot;

	if (!copies || !vib_is_window(endpoint, sg_dma_address(sgl)))
		return;
	slot = slot_of_list(endpoint, sgl);
	if (slot)
		vib_copy(slot, 0, slot->size, to_device);
}

static void sync_sg_for_cpu(struct device *dev, struct scatterlist *sgl, int nents,
			    enum dma_data_direction dir)
{
	sync_list(dev, sgl, vib_writes(dir), false);
}

static void sync_sg_for_device(struct device *dev, struct scatterlist *sgl, int nents,
			       enum dma_data_direction dir)
{
	sync_list(dev, sgl, vib_reads(dir), true);
}

/* Memory that device and CPU share for long is mapped; nothing of it could be copied. */
static void *alloc_shared(struct device *dev, size_t size, dma_addr_t *handle, gfp_t gfp,
			  unsigned long attrs)
{
	void *va;

	size = PAGE_ALIGN(size);
	gfp &= ~(__GFP_DMA | __GFP_DMA32 | __GFP_HIGHMEM | __GFP_COMP);
	va = alloc_pages_exact(size, gfp | __GFP_ZERO);
	if (!va)
		return NULL;
	*handle = vib_map(vib_endpoint(dev), virt_to_phys(va), size, DMA_BIDIRECTIONAL);
	if (*handle != DMA_MAPPING_ERROR)
		return va;
	free_pages_exact(va, size);
	return NULL;
}

static void free_shared(struct device *dev, size_t size, void *va, dma_addr_t handle,
			unsigned long attrs)
{
	size = PAGE_ALIGN(size);
	vib_unmap(vib_endpoint(dev), handle, size);
	free_pages_exact(va, size);
}

/* Larger requests are mapped; block drivers may keep theirs as small as this. */
static size_t opt_mapping_size(void)
{
	return VIB_MAX_SLOT;
}

const struct dma_map_ops vib_dma_ops = {
	.alloc			= alloc_shared,
	.free			= free_shared,
	.map_page		= map_page,
	.unmap_page		= unmap_page,
	.map_sg			= map_sg,
	.unmap_sg		= unmap_sg,
	.sync_single_for_cpu	= sync_single_for_cpu,
	.sync_single_for_device	= sync_single_for_device,
	.sync_sg_for_cpu	= sync_sg_for_cpu,
	.sync_sg_for_device	= sync_sg_for_device,
	.opt_mapping_size	= opt_mapping_size,
};
