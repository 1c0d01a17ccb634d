/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Bouncing of small DMA: the hooks that dma-iommu.c calls, all of which cost one patched branch
 * while nothing bounces.
 */
#ifndef _DMA_BOUNCE_H
#define _DMA_BOUNCE_H

#include <linux/dma-bounce.h>
#include <linux/dma-direction.h>
#include <linux/dma-mapping.h>
#include <linux/iommu.h>
#include <linux/jump_label.h>

struct iova_domain;

/*
 * What says at map that a mapping is used without being synchronised, and what says that it is no
 * memory: newer kernels have attributes of their own for both. They are not told a page but an
 * address, which may have none. Last: whether sync calls are elided.
 */
#ifdef DMA_ATTR_REQUIRE_COHERENT
#define DMA_BOUNCE_ATTR_LASTING		DMA_ATTR_REQUIRE_COHERENT
#define DMA_BOUNCE_ATTR_NO_MEMORY	DMA_ATTR_MMIO
#define dma_bounce_has_page(phys)	pfn_valid(PHYS_PFN(phys))
#define dma_bounce_skips_sync(dev)	dev_dma_skip_sync(dev)
#else
#define DMA_BOUNCE_ATTR_LASTING		DMA_ATTR_PERSISTENT_STREAMING
#define DMA_BOUNCE_ATTR_NO_MEMORY	0
#define dma_bounce_has_page(phys)	((void)(phys), true)
#define dma_bounce_skips_sync(dev)	((dev)->dma_skip_sync)
#endif

#ifdef CONFIG_IOMMU_DMA_BOUNCE

DECLARE_STATIC_KEY_FALSE(dma_bounce_key);

void dma_bounce_init_domain(struct iommu_domain *domain, struct device *dev,
			    struct iova_domain *iovad);
void dma_bounce_free_domain(struct iommu_domain *domain);
void dma_bounce_release_device(struct device *dev);

dma_addr_t __dma_bounce_map_page(struct device *dev, phys_addr_t phys, size_t size,
				 enum dma_data_direction dir, unsigned long attrs);
bool __dma_bounce_unmap_page(struct device *dev, dma_addr_t addr, unsigned long attrs);
bool __dma_bounce_by_piece(struct device *dev);
int __dma_bounce_map_sg(struct device *dev, struct scatterlist *sgl, int nents,
			enum dma_data_direction dir, unsigned long attrs);
bool __dma_bounce_unmap_sg(struct device *dev, struct scatterlist *sgl, int nents,
			   unsigned long attrs);
bool __dma_bounce_sync_single(struct device *dev, dma_addr_t addr, size_t size,
			      enum dma_data_direction dir, bool for_device);
bool __dma_bounce_sync_sg(struct device *dev, struct scatterlist *sgl, int nents,
			  enum dma_data_direction dir, bool for_device);

/* Returns the address to use, or DMA_MAPPING_ERROR if the caller is to map the memory itself. */
static inline dma_addr_t dma_bounce_map_page(struct device *dev, phys_addr_t phys, size_t size,
					     enum dma_data_direction dir, unsigned long attrs)
{
	if (static_branch_unlikely(&dma_bounce_key))
		return __dma_bounce_map_page(dev, phys, size, dir, attrs);
	return DMA_MAPPING_ERROR;
}

/* Returns true if the address was bounced and is unmapped now. So do the other functions below. */
static inline bool dma_bounce_unmap_page(struct device *dev, dma_addr_t addr, unsigned long attrs)
{
	return static_branch_unlikely(&dma_bounce_key) &&
	       __dma_bounce_unmap_page(dev, addr, attrs);
}

/* Returns true if the pieces of a larger mapping are to be mapped each by itself. */
static inline bool dma_bounce_by_piece(struct device *dev)
{
	return static_branch_unlikely(&dma_bounce_key) && __dma_bounce_by_piece(dev);
}

/* Returns the number of DMA segments, or 0 if the caller is to map the list itself. */
static inline int dma_bounce_map_sg(struct device *dev, struct scatterlist *sgl, int nents,
				    enum dma_data_direction dir, unsigned long attrs)
{
	if (static_branch_unlikely(&dma_bounce_key))
		return __dma_bounce_map_sg(dev, sgl, nents, dir, attrs);
	return 0;
}

static inline bool dma_bounce_unmap_sg(struct device *dev, struct scatterlist *sgl, int nents,
				       unsigned long attrs)
{
	return static_branch_unlikely(&dma_bounce_key) &&
	       __dma_bounce_unmap_sg(dev, sgl, nents, attrs);
}

static inline bool dma_bounce_sync_single(struct device *dev, dma_addr_t addr, size_t size,
					  enum dma_data_direction dir, bool for_device)
{
	return static_branch_unlikely(&dma_bounce_key) &&
	       __dma_bounce_sync_single(dev, addr, size, dir, for_device);
}

static inline bool dma_bounce_sync_sg(struct device *dev, struct scatterlist *sgl, int nents,
				      enum dma_data_direction dir, bool for_device)
{
	return static_branch_unlikely(&dma_bounce_key) &&
	       __dma_bounce_sync_sg(dev, sgl, nents, dir, for_device);
}

#else /* !CONFIG_IOMMU_DMA_BOUNCE */

static inline void dma_bounce_init_domain(struct iommu_domain *domain, struct device *dev,
					  struct iova_domain *iovad)
{
}

static inline void dma_bounce_free_domain(struct iommu_domain *domain)
{
}

static inline void dma_bounce_release_device(struct device *dev)
{
}

static inline dma_addr_t dma_bounce_map_page(struct device *dev, phys_addr_t phys, size_t size,
					     enum dma_data_direction dir, unsigned long attrs)
{
	return DMA_MAPPING_ERROR;
}

static inline bool dma_bounce_unmap_page(struct device *dev, dma_addr_t addr, unsigned long attrs)
{
	return false;
}

static inline bool dma_bounce_by_piece(struct device *dev)
{
	return false;
}

static inline int dma_bounce_map_sg(struct device *dev, struct scatterlist *sgl, int nents,
				    enum dma_data_direction dir, unsigned long attrs)
{
	return 0;
}

static inline bool dma_bounce_unmap_sg(struct device *dev, struct scatterlist *sgl, int nents,
				       unsigned long attrs)
{
	return false;
}

static inline bool dma_bounce_sync_single(struct device *dev, dma_addr_t addr, size_t size,
					  enum dma_data_direction dir, bool for_device)
{
	return false;
}

static inline bool dma_bounce_sync_sg(struct device *dev, struct scatterlist *sgl, int nents,
				      enum dma_data_direction dir, bool for_device)
{
	return false;
}

#endif /* CONFIG_IOMMU_DMA_BOUNCE */
#endif /* _DMA_BOUNCE_H */
