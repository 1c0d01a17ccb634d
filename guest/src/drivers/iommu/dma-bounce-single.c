// SPDX-License-Identifier: GPL-2.0-only
/*
 * Bounce buffers for one mapping each
 *
 * An untrusted device must not see other data in the pages of a buffer, so a mapping that does not
 * fill its pages must bounce. If the pool has no slot for it, the mapping gets separate pages. The
 * pages are mapped for this mapping only, and contain zeroes except for the bytes of the buffer.
 * This is slow, but rare, because the pool grows.
 */

#include <linux/gfp.h>
#include <linux/iommu.h>
#include <linux/iova.h>
#include <linux/mm.h>
#include <linux/slab.h>

#include "dma-bounce-copy.h"
#include "dma-bounce-single.h"
#include "dma-bounce-types.h"

/**
 * struct single_use - a mapping with a separate bounce buffer
 * @phys:	physical address of the mapped memory
 * @len:	length of the mapped memory in bytes
 * @addr:	address for the device
 * @va:		address of the copy
 * @order:	order of the copy's pages
 * @read_only:	the device may not write the copy
 */
struct single_use {
	phys_addr_t	phys;
	size_t		len;
	dma_addr_t	addr;
	void		*va;
	unsigned int	order;
	bool		read_only;
};

static void *single_pages(struct single_use *single)
{
	return (void *)((unsigned long)single->va & PAGE_MASK);
}

static unsigned long single_npages(struct single_use *single)
{
	return DIV_ROUND_UP(offset_in_page(single->va) + single->len, PAGE_SIZE);
}

static unsigned long single_index(struct single_use *single)
{
	return single->addr >> PAGE_SHIFT;
}

static void single_free(struct single_use *single)
{
	free_pages((unsigned long)single_pages(single), single->order);
	kfree(single);
}

/* Adds an entry for each page of the mapping. If that fails, adds no entry. */
static int single_insert(struct dma_bounce_pool *pool, struct single_use *single)
{
	unsigned long first = single_index(single), i, flags;
	int ret = 0;

	xa_lock_irqsave(&pool->single_use, flags);
	for (i = 0; i < single_npages(single) && !ret; i++)
		ret = xa_err(__xa_store(&pool->single_use, first + i, single, GFP_ATOMIC));
	if (ret) {
		while (i--)
			__xa_erase(&pool->single_use, first + i);
	}
	xa_unlock_irqrestore(&pool->single_use, flags);
	return ret;
}

static void single_erase(struct dma_bounce_pool *pool, struct single_use *single)
{
	unsigned long first = single_index(single), i, flags;

	xa_lock_irqsave(&pool->single_use, flags);
	for (i = 0; i < single_npages(single); i++)
		__xa_erase(&pool->single_use, first + i);
	xa_unlock_irqrestore(&pool->single_use, flags);
}

/* Returns the length of the mapping's IOVA. A granule of IOVA may be larger than a page. */
static size_t single_iova_len(struct dma_bounce_pool *pool, struct single_use *single)
{
	return iova_align(pool->iovad, PAGE_SIZE << single->order);
}

static int single_map_iova(struct dma_bounce_pool *pool, u64 mask, struct single_use *single,
			   int prot)
{
	size_t len = single_iova_len(pool, single);
	unsigned long shift = iova_shift(pool->iovad), pfn;
	dma_addr_t iova;
	int ret;

	/* If the granule exceeds the pages, the device would see the memory after the pages. */
	if (len != PAGE_SIZE << single->order)
		return -EINVAL;
	if (pool->domain->geometry.force_aperture)
		mask = min_t(u64, mask, pool->domain->geometry.aperture_end);
	pfn = alloc_iova_fast(pool->iovad, len >> shift, mask >> shift, true);
	if (!pfn)
		return -ENOSPC;
	iova = (dma_addr_t)pfn << shift;
	ret = iommu_map(pool->domain, iova, virt_to_phys(single_pages(single)), len, prot,
			GFP_ATOMIC);
	if (ret) {
		free_iova_fast(pool->iovad, pfn, len >> shift);
		return ret;
	}
	single->addr = iova + offset_in_page(single->va);
	return 0;
}

static void single_unmap_iova(struct dma_bounce_pool *pool, struct single_use *single)
{
	size_t len = single_iova_len(pool, single);
	unsigned long shift = iova_shift(pool->iovad);
	dma_addr_t iova = single->addr & ~(dma_addr_t)iova_mask(pool->iovad);

	/* Leak pages that a device may still reach, instead of freeing them. */
	if (WARN_ON_ONCE(iommu_unmap(pool->domain, iova, len) != len)) {
		kfree(single);
		return;
	}
	free_iova_fast(pool->iovad, iova >> shift, len >> shift);
	single_free(single);
}

/**
 * dma_bounce_single_map - map a buffer by separate pages
 * @pool: the pool of the device's domain
 * @mask: DMA mask of the device
 * @phys: address of the buffer
 * @size: length of the buffer in bytes
 * @dir: direction of the transfer
 * @attrs: attributes of the mapping
 *
 * Return: the address for the device, or DMA_MAPPING_ERROR if memory or IOVA is missing. The
 * address has the same offset in its page as the buffer.
 */
dma_addr_t dma_bounce_single_map(struct dma_bounce_pool *pool, u64 mask, phys_addr_t phys,
				 size_t size, enum dma_data_direction dir, unsigned long attrs)
{
	int prot = IOMMU_CACHE | (dir == DMA_FROM_DEVICE ? 0 : IOMMU_READ) |
		   (dir == DMA_TO_DEVICE ? 0 : IOMMU_WRITE);
	unsigned int offset = offset_in_page(phys);
	struct single_use *single;
	void *pages;

	if (size > SZ_1G)
		return DMA_MAPPING_ERROR;
	single = kzalloc(sizeof(*single), GFP_ATOMIC | __GFP_NOWARN);
	if (!single)
		return DMA_MAPPING_ERROR;
	single->order = get_order(offset + size);
	pages = (void *)__get_free_pages(GFP_ATOMIC | __GFP_ZERO | __GFP_NOWARN, single->order);
	if (!pages) {
		kfree(single);
		return DMA_MAPPING_ERROR;
	}
	single->va = pages + offset;
	single->phys = phys;
	single->len = size;
	single->read_only = dir == DMA_TO_DEVICE;
	dma_bounce_copy(single->va, phys, size, true);
	if (single_map_iova(pool, mask, single, prot)) {
		single_free(single);
		return DMA_MAPPING_ERROR;
	}
	if (single_insert(pool, single)) {
		single_unmap_iova(pool, single);
		return DMA_MAPPING_ERROR;
	}
	atomic_inc(&pool->nsingle_use);
	dma_bounce_count(pool, DMA_BOUNCE_SINGLE_USE, 1);
	dma_bounce_count(pool, DMA_BOUNCE_BYTES_IN, size);
	return single->addr;
}

static struct single_use *single_find(struct dma_bounce_pool *pool, dma_addr_t addr)
{
	/* A mapping is counted before its address is returned, so its user sees a count above 0. */
	if (!atomic_read(&pool->nsingle_use))
		return NULL;
	return xa_load(&pool->single_use, addr >> PAGE_SHIFT);
}

/**
 * dma_bounce_single_unmap - unmap a buffer that was mapped by separate pages
 * @pool: the pool of the device's domain
 * @addr: address that dma_bounce_single_map() returned
 * @attrs: attributes of the unmapping
 *
 * Return: false if @addr does not belong to a buffer for one mapping.
 */
bool dma_bounce_single_unmap(struct dma_bounce_pool *pool, dma_addr_t addr, unsigned long attrs)
{
	struct single_use *single = single_find(pool, addr);

	if (!single)
		return false;
	if (WARN_ON_ONCE(addr != single->addr))
		return true;
	single_erase(pool, single);
	atomic_dec(&pool->nsingle_use);
	if (!single->read_only && !(attrs & DMA_ATTR_SKIP_CPU_SYNC)) {
		dma_bounce_copy(single->va, single->phys, single->len, false);
		dma_bounce_count(pool, DMA_BOUNCE_BYTES_OUT, single->len);
	}
	single_unmap_iova(pool, single);
	return true;
}

/**
 * dma_bounce_single_sync - synchronise part of a buffer that was mapped by separate pages
 * @pool: the pool of the device's domain
 * @addr: start of the part in the mapping
 * @size: length of the part in bytes
 * @dir: direction of the transfers that the call is for
 * @for_device: true if the device gets the part, false if the CPU gets it
 *
 * Return: false if @addr does not belong to a buffer for one mapping.
 */
bool dma_bounce_single_sync(struct dma_bounce_pool *pool, dma_addr_t addr, size_t size,
			    enum dma_data_direction dir, bool for_device)
{
	struct single_use *single = single_find(pool, addr);
	size_t skip;

	if (!single)
		return false;
	skip = addr - single->addr;
	if (WARN_ON_ONCE(addr < single->addr || skip > single->len))
		return true;
	/* Copy what is mapped, like swiotlb. Stale data would be worse than the warning. */
	if (WARN_ON_ONCE(size > single->len - skip))
		size = single->len - skip;
	if (dma_bounce_sync_copies(dir, for_device) && (for_device || !single->read_only))
		dma_bounce_copy(single->va + skip, single->phys + skip, size, for_device);
	return true;
}

/**
 * dma_bounce_single_free_all - free all buffers that are still mapped when a domain is freed
 * @pool: the pool of the domain
 */
void dma_bounce_single_free_all(struct dma_bounce_pool *pool)
{
	struct single_use *single;
	unsigned long index;

	xa_for_each(&pool->single_use, index, single) {
		single_erase(pool, single);
		single_unmap_iova(pool, single);
	}
	xa_destroy(&pool->single_use);
}
